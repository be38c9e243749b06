"""Tiny models that take images, of many architectures, with processors in the shapes of published ones.

Each has transformers' default configuration with every size made small (`dagrl.bench.tiny_configs`), and a tokenizer of 256
words, the special tokens of all processors among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagrl.bench.tiny_configs import small_config
from dagrl.data.media import without_videos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

WORDS = 256
SPECIAL = (
    *("<pad>", "<eos>", "<unk>", "<bos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<fake_token_around_image>", "<image>", "<global-img>"),
    *("<end_of_utterance>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    *("<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL", "<|begin_of_video|>", "<|end_of_video|>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
ROPES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}


def make_tokenizer(named: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words, with special tokens under further names."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{number}" for number in range(WORDS - len(SPECIAL)))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"},
        extra_special_tokens=dict(named),
    )


@dataclass(frozen=True)
class ImageModel:
    """A processor of transformers with its `settings`, and the image processor that it has. `token` stands for a part of an
    image; `keys` are of the model's configuration, and `named` special tokens that the tokenizer has by further names."""

    processor: str
    images: tuple[str, Mapping[str, Any]]
    token: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)

    def make(self, tokenizer: Any) -> Any:
        """Returns the processor, without a part for videos. Images are scaled with Pillow."""
        from importlib import import_module

        import transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        name, settings = self.images
        module = import_module(f"transformers.models.{FOLDERS[name]}.image_processing_pil_{FOLDERS[name]}")
        images = getattr(module, f"{name}ImageProcessorPil")(**settings)
        kind = without_videos(getattr(transformers, self.processor))
        return kind(image_processor=images, tokenizer=tokenizer, **self.settings)


FOLDERS = {
    **{"Qwen2VL": "qwen2_vl", "Gemma3": "gemma3", "Idefics3": "idefics3", "Idefics2": "idefics2", "CLIP": "clip"},
    **{"LlavaNext": "llava_next", "LlavaOnevision": "llava_onevision", "GotOcr2": "got_ocr2", "Glm4v": "glm4v"},
}
"""Folders of image processors in transformers."""
PATCHES = ("Qwen2VL", {"min_pixels": 32 * 32, "max_pixels": 96 * 96, "patch_size": 16, "merge_size": 2})
SQUARE = {"height": 32, "width": 32}
CROPPED = {"size": {"shortest_edge": 32}, "crop_size": SQUARE}
TILES = ("GotOcr2", {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4})
GRIDS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
LLAVA = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
VISION = {"spatial_merge_size": 2, "temporal_patch_size": 2}

_QWEN3_VL = ImageModel(
    "Qwen3VLProcessor",
    PATCHES,
    "<|image_pad|>",
    {
        "text_config": {"rope_parameters": {**ROPES, "mrope_interleaved": True}},
        "vision_config": {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    },
)
_GLM4V = ImageModel(
    "Glm4vProcessor",
    ("Glm4v", {"size": {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}, "patch_size": 16, "merge_size": 2}),
    "<|image|>",
    {"text_config": {"rope_parameters": {**ROPES, "partial_rotary_factor": 1.0}}, "vision_config": VISION},
)
_LLAVA = ImageModel("LlavaProcessor", ("CLIP", CROPPED), "<image>", settings=LLAVA)
MODELS: dict[str, ImageModel] = {
    "Qwen2VLForConditionalGeneration": ImageModel(
        "Qwen2VLProcessor",
        PATCHES,
        "<|image_pad|>",
        {"text_config": {"rope_parameters": ROPES}, "vision_config": {**VISION, "embed_dim": 128, "hidden_size": 128}},
    ),
    "Qwen2_5_VLForConditionalGeneration": ImageModel(
        "Qwen2_5_VLProcessor",
        PATCHES,
        "<|image_pad|>",
        {"text_config": {"rope_parameters": ROPES}, "vision_config": {**VISION, "window_size": 64}},
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Glm4vForConditionalGeneration": _GLM4V,
    "Gemma3ForConditionalGeneration": ImageModel(
        "Gemma3Processor",
        ("Gemma3", {"size": SQUARE}),
        "<image_soft_token>",
        {"mm_tokens_per_image": 4},
        {"image_seq_length": 4},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "Idefics3ForConditionalGeneration": ImageModel(
        "Idefics3Processor",
        ("Idefics3", {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}),
        "<image>",
        {"scale_factor": 2},
        {"image_seq_len": 1},
    ),
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": ImageModel(
        "LlavaNextProcessor", ("LlavaNext", {**CROPPED, **GRIDS}), "<image>", GRIDS, LLAVA
    ),
    "LlavaOnevisionForConditionalGeneration": ImageModel(
        "LlavaOnevisionProcessor",
        ("LlavaOnevision", {"size": SQUARE, **GRIDS}),
        "<image>",
        GRIDS,
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "InternVLForConditionalGeneration": ImageModel(
        "InternVLProcessor",
        TILES,
        "<IMG_CONTEXT>",
        {"image_seq_length": 1, "vision_config": {"image_size": [32, 32], "patch_size": [16, 16]}},
        {"image_seq_length": 1},
        {
            **{"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
            "video_token": "<video>",
        },
    ),
    "AyaVisionForConditionalGeneration": ImageModel(
        "AyaVisionProcessor",
        TILES,
        "<|IMG_PATCH|>",
        {"downsample_factor": 2},
        {"patch_size": 16, "img_size": 32, "downsample_factor": 2},
    ),
    "Idefics2ForConditionalGeneration": ImageModel(
        "Idefics2Processor",
        ("Idefics2", {"size": {"longest_edge": 64, "shortest_edge": 32}, "do_image_splitting": False}),
        "<image>",
        {"perceiver_config": {"resampler_n_latents": 4, "resampler_n_heads": 4, "resampler_head_dim": 32}},
        {"image_seq_len": 4},
    ),
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_VL,
    "Glm4vMoeForConditionalGeneration": _GLM4V,
    "VipLlavaForConditionalGeneration": replace(_LLAVA, keys={"vision_feature_layers": [-2, -3, 1]}),
}


def make_image_model(architecture: str, seed: int) -> tuple[Any, ProcessorMixin]:
    """Returns a model with random float32 weights, and its processor."""
    import torch
    import transformers

    entry = MODELS[architecture]
    tokenizer = make_tokenizer(entry.named)
    processor = entry.make(tokenizer)
    kind = getattr(transformers, architecture)
    ids = dict.fromkeys(("image_token_id", "image_token_index"), tokenizer.convert_tokens_to_ids(entry.token))
    special = {
        **{"video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>"},
        **{"vision_end_token_id": "<|vision_end|>", "image_start_token_id": "<|begin_of_image|>"},
        **{"image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>"},
        "video_end_token_id": "<|end_of_video|>",
    }
    keys = {**{key: tokenizer.convert_tokens_to_ids(token) for key, token in special.items()}, **ids, **entry.keys}
    config = small_config(kind.config_class, keys)
    config.architectures = [architecture]
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model, processor
