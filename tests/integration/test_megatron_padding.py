"""Padding with experts changes no loss or gradient, and spreads evenly over the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool

WIDE = 80  # 8 rows with 94 tokens: 85 % padding


def run(group: Group, batch: Batch) -> tuple[dict[str, float], dict[str, Any], Any, Any]:
    """Returns metrics and gradients of a step without update, log-probabilities, and the tokens of each expert."""
    (scored,), (counts,) = group.call("logprobs", batch), group.call("tokens_of_experts", batch)
    metrics = merge_step_metrics(group.call("train_step", batch, "likelihood", warmup="whole")).flat()
    return metrics, reference.assemble(group.call("gradients")), scored["logprobs"], counts


@pytest.mark.parametrize("model", ["qwen3_many_experts", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_padding_adds_nothing_and_is_spread_over_the_experts(
    model: str, megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    """Compares with the same rows one by one, each at its own width."""
    batch = reference.make_batch()
    alone = [batch.select([row]) for row in range(reference.ROWS)]
    config = reference.make_config(tiny_models[model], optimizer={"clip_grad": 1e3})
    with megatron_pool.group(ParallelLayout(), config) as group:
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
