"""Writes a full-size model for a benchmark: random weights drawn on a GPU, and a tokenizer.

python -m dagrl.bench.gpu.models qwen3-4b DIR          writes DIR/qwen3-4b unless it exists; the weights last
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dagrl.bench.models import SHAPES, write_model
from dagrl.run.model import character_tokenizer

CHARACTERS = "0123456789+="


def main(name: str, directory: str) -> None:
    """Writes a model with its tokenizer."""
    target = Path(directory) / name
    if not (target / "model.safetensors").exists():
        target.mkdir(parents=True, exist_ok=True)
        character_tokenizer(CHARACTERS).save_pretrained(target)
        (target / "config.json").write_text(json.dumps(dict(SHAPES[name].config)))
        import torch

        write_model(SHAPES[name], Path(directory), device="cuda" if torch.cuda.is_available() else "cpu")
    print(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
