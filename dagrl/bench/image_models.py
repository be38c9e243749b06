"""Tiny models that take images, of many architectures, with processors in the shapes of published ones.

Each has transformers' default configuration with every size made small (`dagrl.bench.tiny_configs`), and a tokenizer of 256
words, the special tokens of all processors among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """How to make a processor from a tokenizer, the special tokens that it has by further names, and keys of the model's
    configuration. `token` is the one that stands for a part of an image."""

    processor: Callable[[Any], Any]
    token: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


def _pil(name: str, **settings: Any) -> Any:
    """Returns an image processor of transformers that scales with Pillow."""
    from importlib import import_module

    from transformers.utils import logging

    logging.set_verbosity_error()
    kinds = {
        "Qwen2VL": "qwen2_vl", "Gemma3": "gemma3", "Idefics3": "idefics3", "Idefics2": "idefics2", "CLIP": "clip",
        "LlavaNext": "llava_next", "LlavaOnevision": "llava_onevision", "GotOcr2": "got_ocr2", "Pixtral": "pixtral",
        "Glm4v": "glm4v",
    }  # fmt: skip
    module = import_module(f"transformers.models.{kinds[name]}.image_processing_pil_{kinds[name]}")
    return getattr(module, f"{name}ImageProcessorPil")(**settings)


def _made(processor: str, *, images: Any, videos: bool = False, **settings: Any) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        import transformers

        kind = getattr(transformers, processor)
        if videos:
            return without_videos(kind)(images(), tokenizer, None, **settings)
        return kind(image_processor=images(), tokenizer=tokenizer, **settings)

    return make


def _patches(name: str) -> Callable[[], Any]:
    return lambda: _pil(name, min_pixels=32 * 32, max_pixels=96 * 96, patch_size=16, merge_size=2)


def _square(name: str, **settings: Any) -> Callable[[], Any]:
    size = {"height": 32, "width": 32}
    return lambda: _pil(name, size=size, **settings)


_TILES = _square("GotOcr2", crop_to_patches=True, min_patches=1, max_patches=4)
_CLIP = lambda: _pil("CLIP", size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})  # noqa: E731
_NEXT = lambda: _pil(  # noqa: E731
    "LlavaNext",
    size={"shortest_edge": 32},
    crop_size={"height": 32, "width": 32},
    image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
)
_QWEN_VISION = {"spatial_merge_size": 2, "temporal_patch_size": 2}
_SIGLIP_TEXT = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}

MODELS: dict[str, ImageModel] = {
    "Qwen2VLForConditionalGeneration": ImageModel(
        _made("Qwen2VLProcessor", images=_patches("Qwen2VL"), videos=True),
        "<|image_pad|>",
        {"text_config": {"rope_parameters": ROPES}, "vision_config": {**_QWEN_VISION, "embed_dim": 128, "hidden_size": 128}},
    ),
    "Qwen2_5_VLForConditionalGeneration": ImageModel(
        _made("Qwen2_5_VLProcessor", images=_patches("Qwen2VL"), videos=True),
        "<|image_pad|>",
        {"text_config": {"rope_parameters": ROPES}, "vision_config": {**_QWEN_VISION, "window_size": 64}},
    ),
    "Qwen3VLForConditionalGeneration": ImageModel(
        _made("Qwen3VLProcessor", images=_patches("Qwen2VL"), videos=True),
        "<|image_pad|>",
        {
            "text_config": {"rope_parameters": {**ROPES, "mrope_interleaved": True}},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        },
    ),
    "Glm4vForConditionalGeneration": ImageModel(
        _made(
            "Glm4vProcessor",
            images=lambda: _pil(
                "Glm4v", size={"shortest_edge": 32 * 32, "longest_edge": 96 * 96}, patch_size=16, merge_size=2
            ),
            videos=True,
        ),
        "<|image|>",
        {
            "text_config": {"rope_parameters": {**ROPES, "partial_rotary_factor": 1.0}},
            "vision_config": _QWEN_VISION,
        },
    ),
    "Gemma3ForConditionalGeneration": ImageModel(
        _made("Gemma3Processor", images=_square("Gemma3"), image_seq_length=4),
        "<image_soft_token>",
        {"mm_tokens_per_image": 4},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "Idefics3ForConditionalGeneration": ImageModel(
        _made(
            "Idefics3Processor",
            images=lambda: _pil("Idefics3", size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
            image_seq_len=1,
        ),
        "<image>",
        {"scale_factor": 2},
    ),
    "LlavaForConditionalGeneration": ImageModel(
        _made(
            "LlavaProcessor",
            images=_CLIP,
            patch_size=16,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        "<image>",
    ),
    "LlavaNextForConditionalGeneration": ImageModel(
        _made(
            "LlavaNextProcessor",
            images=_NEXT,
            patch_size=16,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        "<image>",
        {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    ),
    "LlavaOnevisionForConditionalGeneration": ImageModel(
        _made(
            "LlavaOnevisionProcessor",
            images=_square("LlavaOnevision", image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]]),
            videos=True,
            num_image_tokens=4,
            vision_feature_select_strategy="full",
        ),
        "<image>",
        {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    ),
    "InternVLForConditionalGeneration": ImageModel(
        _made("InternVLProcessor", images=_TILES, videos=True, image_seq_length=1),
        "<IMG_CONTEXT>",
        {"image_seq_length": 1, "vision_config": {"image_size": [32, 32], "patch_size": [16, 16]}},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "AyaVisionForConditionalGeneration": ImageModel(
        _made("AyaVisionProcessor", images=_TILES, patch_size=16, img_size=32, downsample_factor=2),
        "<|IMG_PATCH|>",
        {"downsample_factor": 2},
    ),
    "Idefics2ForConditionalGeneration": ImageModel(
        _made(
            "Idefics2Processor",
            images=lambda: _pil("Idefics2", size={"longest_edge": 64, "shortest_edge": 32}, do_image_splitting=False),
            image_seq_len=4,
        ),
        "<image>",
        {"perceiver_config": {"resampler_n_latents": 4, "resampler_n_heads": 4, "resampler_head_dim": 32}},
    ),
}


_SAME = {
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration": "Qwen3VLForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3VLForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration": "Glm4vForConditionalGeneration",
}
MODELS |= {name: MODELS[other] for name, other in _SAME.items()}
MODELS["VipLlavaForConditionalGeneration"] = replace(
    MODELS["LlavaForConditionalGeneration"], keys={"vision_feature_layers": [-2, -3, 1]}
)


def make_image_model(architecture: str, seed: int) -> tuple[Any, ProcessorMixin]:
    """Returns a model with random float32 weights, and its processor."""
    import torch
    import transformers

    entry = MODELS[architecture]
    tokenizer = make_tokenizer(entry.named)
    processor = entry.processor(tokenizer)
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
