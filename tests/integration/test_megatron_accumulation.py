"""A step with gradients accumulated in parts equals the step on the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import LossConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import PACKED, UNCLIPPED, logprobs, shard_batches, train

CASES: dict[str, tuple[str, ParallelLayout, dict[str, Any], bool]] = {
    "tp2pp2-by-tokens": ("qwen3", ParallelLayout(tp=2, pp=2), {}, True),
    "dp2cp2-sharded-packed": ("qwen3", ParallelLayout(dp=2, cp=2), {"use_distributed_optimizer": True}, False),
    "dp2vpp2-overlapped": ("qwen3", ParallelLayout(dp=2, pp=2, vpp=2), {}, True),
    "moe-dp2pp2ep2vpp2": ("qwen3_moe", ParallelLayout(dp=2, pp=2, ep=2, vpp=2), {}, False),
}
PARTS = ([0, 3, 5], [6], [1, 2, 4, 7])  # the second has a row without loss tokens


@pytest.mark.parametrize(("model", "layout", "optimizer", "token_level"), CASES.values(), ids=CASES)
def test_accumulated_parts_equal_the_whole_batch(
    model: str,
    layout: ParallelLayout,
    optimizer: dict[str, Any],
    token_level: bool,
    megatron_pool: MegatronPool,
    tiny_models: dict[str, Path],
) -> None:
    packed = PACKED if optimizer else {}
    megatron = {"distributed_data_parallel_config": {"overlap_grad_reduce": layout.vpp > 1}}
    config = reference.make_config(tiny_models[model], optimizer={**UNCLIPPED, **optimizer}, megatron_cfg=megatron, **packed)
    loss = LossConfig(token_level_loss=token_level, reference_policy_kl_penalty=0.1)
    batch = reference.make_batch(grpo=True).with_scalars(lr=0.0)  # steps do not change the weights
    sharded = bool(optimizer)  # each worker then has only its shard of the reduced gradients
    with megatron_pool.group(layout, config.model_copy(update={"loss_fn": loss})) as group:
        expected = step(group, batch)
        gradients = {} if sharded else gradients_of(group)
        accumulate(group, batch, [1, 7])  # of an abandoned step
        found = step(group, batch, PARTS), {} if sharded else gradients_of(group)
        accumulate(group, batch, [2])
        with pytest.raises(WorkerError, match=r"follows 2 accumulated parts, but this worker has 1; replay accumulate"):
            train(group, batch.with_scalars(parts=2.0), "policy")
        accumulate(group, batch, [2])
        group.call("accumulate_gradients", per_rank=per_rank(group, batch.select([3])), warmup=True)
        with pytest.raises(WorkerError, match="this worker has 0"):
            train(group, batch.with_scalars(parts=1.0), "policy")
        again = step(group, batch), {} if sharded else gradients_of(group)
    assert expected["grad_norm"] > 0.01
    assert found[0] == pytest.approx(expected, rel=2e-6, abs=1e-7)
    assert again[0] == pytest.approx(expected, rel=2e-6, abs=1e-7)
    for _, others in (found, again):
        for name, gradient in gradients.items():
            scale = float(np.abs(gradient).max()) or 1.0
            np.testing.assert_allclose(others[name] / scale, gradient / scale, atol=5e-6, err_msg=name)


def test_a_forced_ratio_needs_no_logprobs_before_the_step(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    """Metrics and gradients equal those of the step that gets `logprobs` in its batch, also in parts."""
    config = reference.make_config(tiny_models["qwen3"], optimizer=UNCLIPPED, **PACKED)
    batch = reference.make_batch(grpo=True).with_scalars(lr=0.0)
    with megatron_pool.group(ParallelLayout(tp=2, cp=2), config) as group:
        rows = logprobs(group, batch)
        mask = batch["loss_mask"]
        expected = step(group, batch.with_fields(prev_logprobs=rows["logprobs"] * mask))
        gradients = gradients_of(group)
    expected["policy/entropy"] = float((rows["entropy"] * mask).sum() / mask.sum())
    with megatron_pool.group(
        ParallelLayout(tp=2, cp=2), config.model_copy(update={"loss_fn": LossConfig(force_on_policy_ratio=True)})
    ) as group:
        for parts in ((), PARTS):
            found = step(group, batch, parts)
            assert found == pytest.approx(expected, rel=1e-5, abs=2e-6)
            for name, gradient in gradients_of(group).items():
                scale = float(np.abs(gradients[name]).max()) or 1.0
                np.testing.assert_allclose(gradient / scale, gradients[name] / scale, atol=5e-6, err_msg=name)


def step(group: Group, batch: Batch, parts: Sequence[Sequence[int]] = ()) -> dict[str, float]:
    """Returns metrics. The last of `parts` is replayed with the step."""
    for number, rows in enumerate(parts[:-1]):
        accumulate(group, batch, rows, number)
    rest = batch.select(parts[-1]).with_scalars(parts=float(len(parts) - 1)) if parts else batch
    metrics = train(group, rest, "policy")
    metrics.pop("microbatch_padding_share")  # depends on which rows go together
    return metrics


def gradients_of(group: Group) -> dict[str, Any]:
    return dict(reference.assemble(group.call("gradients")))


def accumulate(group: Group, batch: Batch, rows: Sequence[int], parts: int = 0) -> None:
    group.call("accumulate_gradients", per_rank=per_rank(group, batch.select(rows).with_scalars(parts=float(parts))))


def per_rank(group: Group, batch: Batch) -> list[tuple[Batch, str]]:
    shards = shard_batches(batch, group.layout)
    return [(shards[group.layout.coordinates(rank).dp], "policy") for rank in range(group.layout.world_size)]
