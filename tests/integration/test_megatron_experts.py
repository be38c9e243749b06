"""Training steps with grouped experts equal Megatron's sequential ones; padding changes none and spreads over experts."""

import gc
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool
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


WIDE = 80  # 8 rows with 94 tokens: 85 % padding


def run(group: Group, batch: Batch) -> tuple[dict[str, float], dict[str, Any], Any, Any]:
    """Returns metrics and gradients of a step without update, log-probabilities, and the tokens of each expert."""
    (scored,), (counts,) = group.call("logprobs", batch), group.call("tokens_of_experts", batch)
    metrics = merge_step_metrics(group.call("train_step", batch, "likelihood", warmup="whole")).flat()
    return metrics, reference.assemble(group.call("gradients")), scored["logprobs"], counts


@pytest.mark.parametrize("model", ["qwen3_many_experts", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_padding_adds_nothing_and_is_spread_over_the_experts(model: str, pool: MegatronPool) -> None:
    """Compares with the same rows one by one, each at its own width."""
    batch = reference.make_batch()
    alone = [batch.select([row]) for row in range(reference.ROWS)]
    config = reference.make_config(pool.models[model], optimizer={"clip_grad": 1e3})
    with pool.group(ParallelLayout(), config) as group:
        found, gradients, logprobs, counts = run(group, reference.padded(batch, Bucket(reference.ROWS, WIDE)))
        tight = [run(group, reference.padded(row, Bucket(1, int(row["lengths"][0])))) for row in alone]
    assert found["microbatch_padding_share"] > 0.8
    assert {metrics["microbatch_padding_share"] for metrics, *_ in tight} == {0.0}
    assert found["loss"] == pytest.approx(sum(metrics["loss"] for metrics, *_ in tight), abs=1e-5)
    reference.assert_gradients(gradients, {name: sum(part[name] for _, part, *_ in tight) for name in gradients}, 1e-4)
    for row, (_, _, expected, _) in enumerate(tight):
        length = expected.shape[1]
        np.testing.assert_allclose(logprobs[row, :length], expected[0], atol=1e-4, rtol=0)
        assert not logprobs[row, length:].any()
    own = sum(part for *_, part in tight)
    for padded, exact in zip(counts / counts.sum(1, keepdims=True), own / own.sum(1, keepdims=True), strict=True):
        assert padded.max() < 1.25 * exact.max()
