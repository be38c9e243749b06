"""Qwen3 and Qwen3-VL models of published shapes with random weights, written like checkpoints.

Sizes, in `models.yaml`, come from the published `config.json` files. `with_layers` shortens a model to fit a machine and
changes its name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from dagrl.config import Json

if TYPE_CHECKING:
    import torch

CHARACTERS = "0123456789+="
IMAGE_TOKENIZER = Path(__file__).parents[1] / "examples" / "data" / "shapes"
IMAGE_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 768}
"""Fewest and most pixels of an image that processors do not scale, and of which engines profile the largest."""


@dataclass(frozen=True)
class ModelShape:
    """A model's name and its `config.json`."""

    name: str
    config: Mapping[str, Json]

    def with_layers(self, layers: int) -> ModelShape:
        """Returns the same model with fewer layers."""
        return ModelShape(f"{self.name}-{layers}-layers", {**self.config, "num_hidden_layers": layers})

    def narrowed(self) -> ModelShape:
        """Returns a tiny model of the same architecture."""
        small: dict[str, Json] = {"vocab_size": 512, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        small |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        if "num_experts" in self.config:
            small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        if self.images:
            vision: dict[str, Json] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
            vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
            ropes: dict[str, Json] = {**cast("dict[str, Json]", self.text["rope_parameters"]), "mrope_section": [6, 5, 5]}
            small = {
                "text_config": {**self.text, **small, "rope_parameters": ropes},
                "vision_config": {**cast("dict[str, Json]", self.config["vision_config"]), **vision},
            }
        return ModelShape(f"{self.name}-tiny", {**self.config, **small})

    @property
    def images(self) -> bool:
        """Whether the model takes images."""
        return "vision_config" in self.config

    @property
    def text(self) -> dict[str, Json]:
        """The part of `config` with the sizes of the language model."""
        return cast("dict[str, Json]", self.config.get("text_config", self.config))


SHAPES = {
    name: ModelShape(name, config)
    for name, config in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}


def write_model(shape: ModelShape, directory: Path, dtype: str = "bfloat16") -> Path:
    """Writes the model below `directory`: normal weights of deviation 0.02, norms of 1. Draws on a GPU if there is one."""
    import torch
    from safetensors.torch import save_file

    from dagrl.workers.megatron.weights import parameter_shapes

    target = directory / shape.name
    target.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    weights = {
        name: _draw(size, getattr(torch, dtype), generator).cpu() for name, size in parameter_shapes(shape.config).items()
    }
    torch.cuda.empty_cache()
    (target / "config.json").write_text(json.dumps({**shape.config, "dtype": dtype}, indent=2))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def write_with_tokenizer(shape: ModelShape, directory: Path, dtype: str = "bfloat16") -> Path:
    """Writes a model with a tokenizer of digits below `directory`, unless its weights, which are written last, exist.

    One that takes images has the tokenizer of `examples/data/shapes`, and a processor with the model's patches.
    """
    from dagrl.run.model import character_tokenizer

    target = directory / shape.name
    if not (target / "model.safetensors").exists():
        target.mkdir(parents=True, exist_ok=True)
        if shape.images:
            _write_image_model(shape, target, dtype)
        else:
            character_tokenizer(CHARACTERS).save_pretrained(target)
            write_model(shape, directory, dtype)
    return target


def _write_image_model(shape: ModelShape, target: Path, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    shutil.copytree(IMAGE_TOKENIZER, target, dirs_exist_ok=True)
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        content = json.loads((target / name).read_text())
        content.get("image_processor", content).update(patch_size=16, size=IMAGE_PIXELS)
        (target / name).write_text(json.dumps(content))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.for_model(**shape.config)
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(target, max_shard_size="100GB")
    del model
    torch.cuda.empty_cache()


def _draw(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    import torch

    if len(size) == 1:
        return torch.ones(size, dtype=dtype, device=generator.device)
    return (torch.randn(size, generator=generator, device=generator.device) * 0.02).to(dtype)
