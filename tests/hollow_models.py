"""Checkpoints of published shapes whose weights are a hole in a sparse file."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.bench.models import SHAPES
from dagrl.run.model import character_tokenizer
from dagrl.workers.megatron.weights import parameter_shapes


def write_hollow_model(directory: Path, name: str, *tokenizer: str) -> Path:
    """Writes a model of `SHAPES`, with a tokenizer by the arguments of `character_tokenizer`."""
    return write_hollow_checkpoint(directory, SHAPES[name].config, *tokenizer)


def write_hollow_checkpoint(directory: Path, config: Mapping[str, Any], *tokenizer: str) -> Path:
    """Writes `config.json`, a tokenizer, and headers of the weights: of a Qwen3 model, or of transformers' class."""
    directory.mkdir(exist_ok=True)
    character_tokenizer(*tokenizer).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    header: dict[str, Any] = {}
    end = 0
    for parameter, shape in _shapes(directory, config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[parameter] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


def _shapes(directory: Path, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    if str(config["model_type"]).startswith("qwen3"):
        return parameter_shapes(config)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}  # a tied head is not one of them
