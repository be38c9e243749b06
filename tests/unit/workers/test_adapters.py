"""Adapters of another model or other settings are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dagrl.config import PeftConfig
from dagrl.errors import CheckpointError
from dagrl.workers.train.adapters import check_adapters

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
SHAPES = {"model.embed_tokens.weight": (32, 8), Q: (16, 8), UP: (24, 8), "model.norm.weight": (8,)}


def write(directory: Path, shapes: dict[str, tuple[int, int]], **settings: Any) -> None:
    """Writes adapters as PEFT does."""
    (directory / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, **settings}))
    tensors = {f"base_model.model.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "adapter_model.safetensors")


def settings(directory: Path) -> PeftConfig:
    return PeftConfig.model_validate(
        {"enabled": True, "dim": 4, "alpha": 8, "target_modules": ["q_proj"], "adapter_path": str(directory)}
    )


PAIR = {"model.layers.0.self_attn.q_proj.lora_A": (4, 8), "model.layers.0.self_attn.q_proj.lora_B": (16, 4)}


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ({**PAIR, "model.layers.0.self_attn.q_proj.lora_B": (32, 4)}, {}, r"shape \(32, 4\), expected \(16, 4\)"),
        ({**PAIR, "model.layers.1.self_attn.q_proj.lora_A": (4, 8)}, {}, r"shape \(4, 8\), expected none"),
        (dict(list(PAIR.items())[:1]), {}, r"lora_B.weight' has shape none, expected \(16, 4\)"),
        (PAIR, {"r": 16}, r"has r 16, but .*peft.dim is 4; set .*peft.dim=16"),
        (PAIR, {"use_rslora": True}, "use_rslora, which dagrl does not train"),
        (PAIR, {"use_dora": True}, "use_dora, which dagrl does not train"),
        (PAIR, {"rank_pattern": {"q_proj": 2}}, "rank_pattern, which dagrl does not train"),
    ],
    ids=["shape", "layer", "incomplete", "rank", "rslora", "dora", "ranks"],
)
def test_other_adapters_are_refused(
    shapes: dict[str, tuple[int, int]], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, shapes, **more)
    with pytest.raises(CheckpointError, match=message):
        check_adapters(settings(tmp_path), SHAPES)


def test_fitting_adapters_are_accepted(tmp_path: Path) -> None:
    write(tmp_path, PAIR)
    check_adapters(settings(tmp_path), SHAPES)
