"""Padding adds nothing to a step and is spread over experts, whose weights are joined; memory is free after the end."""

import gc
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.runtime.shapes import Batch, Bucket
from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import UNCLIPPED, Case, each, gradients_of, megatron
from tests.integration.train_pool import Group, WorkerPool
from tests.integration.train_workers import TestedMegatronWorker
from tests.single_worker import single_worker

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")


def assert_joined(worker: TestedMegatronWorker) -> None:
    """Checks that weights and gradients of a layer's experts are views of one tensor, as the grouped product needs."""
    from dagrl.workers.megatron.experts import GroupedExperts, joined

    for layer in worker.modules(GroupedExperts):
        for kind in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, kind).weight for expert in layer.local_experts]
            assert joined(weights) is not None and joined([weight.main_grad for weight in weights]) is not None


def test_a_worker_keeps_no_memory_after_shutdown(tiny_models: dict[str, Path]) -> None:
    """The process may serve another model next."""
    with single_worker(reference.make_config(tiny_models["qwen3_moe"]), TestedMegatronWorker) as made:
        assert_joined(made)
        made.train_step(reference.make_batch(), "likelihood")
        trainer = made.trainer
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
    return metrics, gradients_of(group), scored["logprobs"], counts


@each([megatron("qwen3_many_experts"), megatron("mixtral", slow=True)])
def test_padding_adds_nothing_and_is_spread_over_the_experts(case: Case, pool: WorkerPool) -> None:
    """Compares with the same rows one by one, each at its own width."""
    batch = reference.make_batch()
    alone = [batch.select([row]) for row in range(reference.ROWS)]
    with case.group(pool, optimizer=UNCLIPPED) as group:
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
