"""Checkpoints of published shapes whose weights are a hole in a sparse file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dagrl.bench.models import SHAPES
from dagrl.run.model import character_tokenizer
from dagrl.workers.megatron.weights import parameter_shapes


def write_hollow_model(directory: Path, name: str, *tokenizer: str) -> Path:
    """Writes `config.json`, a tokenizer by the arguments of `character_tokenizer`, and headers of the weights."""
    directory.mkdir(exist_ok=True)
    character_tokenizer(*tokenizer).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({**SHAPES[name].config, "dtype": "bfloat16"}))
    header: dict[str, Any] = {}
    end = 0
    for parameter, shape in parameter_shapes(SHAPES[name].config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[parameter] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory
