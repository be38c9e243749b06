"""Whole training steps with grouped experts are those of Megatron's experts one after the other."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.train_inputs import single_worker
from dagrl.metrics import merge_step_metrics
from dagrl.worker import ReplayContext, _current
from tests.integration import megatron_reference as reference
from tests.integration.megatron_worker import TestedWorker

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")

WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
    "recomputed": {"megatron_cfg": {"activation_checkpointing": True}},
}


def step_of(model: Path, precision: str, **policy: Any) -> tuple[dict[str, Any], float, float]:
    """Gradients by the names of checkpoints, loss and gradient norm of one step on one worker in this process."""
    config = reference.make_config(model, precision=precision, optimizer={"clip_grad": 1e3}, **policy)
    with single_worker(config, TestedWorker) as made:
        token = _current.set(ReplayContext("test", 0, True))  # gradients, but no update
        try:
            metrics = made.train_step(reference.make_batch(), "sft")
        finally:
            _current.reset(token)
        figures = merge_step_metrics([metrics]).flat()
        return reference.assemble([made.gradients()]), figures["loss"], figures["grad_norm"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_steps_are_those_of_experts_one_by_one(
    name: str, way: str, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, loss, norm = step_of(tiny_models[name], "float32", **WAYS[way])
    from megatron.core.transformer.moe.experts import SequentialMLP

    monkeypatch.setattr("workers.megatron.model.GroupedExperts", SequentialMLP)
    expected, expected_loss, expected_norm = step_of(tiny_models[name], "float32", **WAYS[way])
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        np.testing.assert_allclose(found[key], gradient, rtol=1e-4, atol=1e-6, err_msg=key)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-6)
