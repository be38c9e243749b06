"""Training steps with grouped experts equal those with Megatron's sequential experts."""

from __future__ import annotations

import gc
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.megatron_worker import TestedWorker, gradients_alone
from tests.single_worker import single_worker

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")

WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
    "recomputed": {"megatron_cfg": {"activation_checkpointing": True}},
}


def step_of(model: Path, precision: str, experts: type, **policy: Any) -> tuple[dict[str, Any], float, float]:
    """Gradients by the names of checkpoints, loss and gradient norm of one step on one worker in this process.

    `experts`: the expected kind of its layers.
    """
    from dagrl.workers.megatron.experts import GroupedExperts, joined

    config = reference.make_config(model, precision=precision, optimizer={"clip_grad": 1e3}, **policy)
    with single_worker(config, TestedWorker) as made:
        modules = [module for chunk in made.megatron().trainer.model.chunks for module in chunk.modules()]
        assert {type(module) for module in modules if hasattr(module, "local_experts")} == {experts}
        with gradients_alone():
            metrics = made.train_step(reference.make_batch(), "likelihood")
        figures = merge_step_metrics([metrics]).flat()
        for layer in (module for module in modules if isinstance(module, GroupedExperts)):
            for kind in ("linear_fc1", "linear_fc2"):
                weights = [getattr(expert, kind).weight for expert in layer.local_experts]
                assert joined(weights) is not None and joined([weight.main_grad for weight in weights]) is not None
        return reference.assemble([made.gradients()]), figures["loss"], figures["grad_norm"]


@pytest.mark.parametrize(("name", "way"), [("qwen3_moe", "padded"), ("qwen3_moe", "packed"), ("mixtral", "recomputed")])
def test_steps_equal_those_of_sequential_experts(
    name: str, way: str, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    from dagrl.workers.megatron.experts import GroupedExperts

    found, loss, norm = step_of(tiny_models[name], "float32", GroupedExperts, **WAYS[way])

    class Sequential(SequentialMLP):  # type: ignore[misc]
        def join_weights(self) -> None: ...

    monkeypatch.setattr("dagrl.workers.megatron.model.GroupedExperts", Sequential)
    expected, expected_loss, expected_norm = step_of(tiny_models[name], "float32", Sequential, **WAYS[way])
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        np.testing.assert_allclose(found[key], gradient, rtol=1e-4, atol=1e-6, err_msg=key)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-6)


def test_a_worker_keeps_no_memory_after_shutdown(tiny_models: dict[str, Path]) -> None:
    """The process may serve another model next."""
    with single_worker(reference.make_config(tiny_models["qwen3_moe"]), TestedWorker) as made:
        made.train_step(reference.make_batch(), "likelihood")
        trainer = made.megatron().trainer
        held = [*trainer.model.parameters().values(), *trainer.state("gradients"), *trainer.state("optimizer")]
        alive = [weakref.ref(tensor) for tensor in held]
        del trainer, held
    gc.collect()
    assert not [reference for reference in alive if reference() is not None]
