"""Makes tiny models of other families for `examples/grpo_images.yaml`, from a seed.

    python -m recipes.shapes.make idefics3 -o runs/shapes_idefics3 [--seed 0]
    dagrl train examples/grpo_images.yaml policy.random_init=null policy.tokenizer.name=null \\
        policy.model_name=runs/shapes_idefics3 policy.max_total_sequence_length=64

A directory has the model, a tokenizer of the task's words, and the family's processor, which makes 16 tokens of an image of
64 x 64 pixels: one for each cell of its grid.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SPECIAL = {
    "idefics3": (
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
}
"""Tokens of each family's processor; the first one stands for an image in the chat template."""

NEWLINES = ["\n" * count for count in range(1, 5)]
"""Tokens that vLLM's Gemma 3 looks for, whose processor puts some around an image."""

WORDS = "user assistant what is there one two three four red green blue black".split()
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}IMAGE{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
TOKENS = 16
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.05}
TEXT = {**SIZES, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
VISION = {**SIZES, "intermediate_size": 128, "image_size": 64, "patch_size": 8}


def make_tokenizer(family: str) -> Any:
    """Returns a tokenizer of words with the family's special tokens and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *SPECIAL[family]]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*special, *WORDS])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(special)
    if family == "gemma3":
        backend.add_tokens(NEWLINES)
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"},
        extra_special_tokens=names if family == "gemma3" else {},
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", SPECIAL[family][0])
    return tokenizer


def idefics3(tokenizer: Any, text: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns processor and configuration of Idefics3's shape, whose images are one tile."""
    from transformers import AutoConfig, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    size = {"longest_edge": VISION["image_size"]}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=TOKENS, chat_template=tokenizer.chat_template)
    config = AutoConfig.for_model(
        "idefics3",
        text_config={"model_type": "llama", "tie_word_embeddings": False, **text},
        vision_config=VISION,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    return processor, config


def gemma3(tokenizer: Any, text: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns processor and configuration of Gemma 3's shape. vLLM generates with it on GPUs alone."""
    from transformers import AutoConfig, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    size = {"height": VISION["image_size"], "width": VISION["image_size"]}
    images = Gemma3ImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = Gemma3Processor(images, tokenizer, image_seq_length=TOKENS, chat_template=tokenizer.chat_template)
    config = AutoConfig.for_model(
        "gemma3",
        text_config={
            **text,
            **{"query_pre_attn_scalar": 32, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        },
        vision_config={**VISION, "vision_use_head": False},
        mm_tokens_per_image=TOKENS,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        tie_word_embeddings=False,
    )
    return processor, config


FAMILIES: Mapping[str, Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]] = {"idefics3": idefics3, "gemma3": gemma3}


def make(family: str, directory: Path, seed: int) -> None:
    """Writes the model and its processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = make_tokenizer(family)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    processor, config = FAMILIES[family](tokenizer, {**TEXT, **ends, "vocab_size": len(tokenizer)})
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)
    if family == "gemma3":
        _rename(directory / "model.safetensors")
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _rename(file: Path) -> None:
    """Gives the tensors of a vision tower the names that published checkpoints have, and vLLM 0.26 reads alone."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file(
        {name.replace("vision_tower.", "vision_tower.vision_model."): tensors[name] for name in tensors},
        file,
        {"format": "pt"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.family, options.output, options.seed)


if __name__ == "__main__":
    main()
