"""Writes a full-size model for a benchmark: random weights drawn on a GPU, and a tokenizer.

python -m dagrl.bench.gpu.models qwen3-4b DIR          writes DIR/qwen3-4b unless it exists; the weights last
"""

from __future__ import annotations

import sys
from pathlib import Path

from dagrl.bench.models import SHAPES, ModelShape, write_model
from dagrl.run.model import character_tokenizer

CHARACTERS = "0123456789+="


def write_with_tokenizer(shape: ModelShape, directory: Path, dtype: str = "bfloat16") -> Path:
    """Writes a model with its tokenizer below `directory` unless it exists, on a GPU if there is one. Returns its path."""
    target = directory / shape.name
    if not (target / "model.safetensors").exists():
        target.mkdir(parents=True, exist_ok=True)
        character_tokenizer(CHARACTERS).save_pretrained(target)
        write_model(shape, directory, dtype)
    return target


if __name__ == "__main__":
    print(write_with_tokenizer(SHAPES[sys.argv[1]], Path(sys.argv[2])))
