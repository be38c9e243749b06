"""Architectures of the table of FSDP training: the same steps as plain torch, in the processes of other tests.

`python -m dagrl.bench.train_architectures` has all of them, and vLLM's samples after refits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.bench.tiny_configs import tiny_model
from dagrl.bench.train_architectures import LAYOUTS, PACKED, STEPS, make_batch, make_config, plain_steps
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_megatron_layouts import train

PADDED: dict[str, Any] = {}
CASES = [
    ("Cohere2ForCausalLM", "dp2", PACKED),  # scaled logits
    ("DeepseekV3ForCausalLM", "tp2", PACKED),  # latent attention
    ("Gemma2ForCausalLM", "dp2", PACKED),  # capped logits
    ("Gemma4ForCausalLM", "cp2", PACKED),  # heads of two sizes
    ("GPT2LMHeadModel", "dp2", PACKED),
    ("HrmTextForCausalLM", "dp2", PACKED),  # layers that run many times, parameters that files have joined
    ("OlmoHybridForCausalLM", "dp2", PADDED),  # linear attention
]


SLOW = {"HrmTextForCausalLM", "OlmoHybridForCausalLM"}
"""What the table's own command has too, and takes longest."""


@pytest.mark.parametrize(
    ("name", "layout", "packing"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=[pytest.mark.slow] * (case[0] in SLOW)) for case in CASES],
)
def test_steps_are_those_of_transformers(
    name: str, layout: str, packing: dict[str, Any], megatron_pool: MegatronPool, tmp_path: Path
) -> None:
    tiny_model(name, seed=0).float().save_pretrained(tmp_path)  # type: ignore[operator]
    expected, config = plain_steps(tmp_path), make_config(tmp_path, LAYOUTS[layout], packing)
    with megatron_pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        steps = [train(group, make_batch(), kind) for kind in STEPS]
    losses, norms = zip(*expected, strict=True)
    np.testing.assert_allclose([step["loss"] for step in steps], losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([step["grad_norm"] for step in steps], norms, rtol=1e-4)
