"""Models of real shapes for the measurements, made on the spot: random weights on a GPU, and a tokenizer.

python -m bench.gpu.models qwen3-4b DIR          writes DIR/qwen3-4b, unless it is there
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.models import SHAPES, write_model
from dagrl.model_init import character_tokenizer

CHARACTERS = "0123456789+="


def main(name: str, directory: str) -> None:
    """Write a model with its tokenizer."""
    import torch

    target = Path(directory) / name
    if not (target / "tokenizer.json").exists():
        write_model(SHAPES[name], Path(directory), device="cuda" if torch.cuda.is_available() else "cpu")
        character_tokenizer(CHARACTERS).save_pretrained(target)
    print(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
