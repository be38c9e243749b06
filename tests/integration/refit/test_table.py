"""Refits of any layout, and the mappings of NeMo-RL's pull request 2413, planned at full size."""

import pickle
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dagrl.refit import RefitPlan, plan_refit
from dagrl.refit.plan.planner import BUCKET_BYTES
from dagrl.refit.transfers import DIRECT_BYTES
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.refit_mappings import DEEPSEEK_V3, QWEN3_4B, QWEN3_30B, QWEN3_235B, TABLE, RefitMapping
from tests.unit.refit.memory_channel import run_refit
from tests.unit.refit.test_plan import TiedHead, check_megatron_to_vllm, megatron_slices
from tests.unit.refit.weight_reference import (
    VllmRank,
    equal,
    hf_shapes,
    hf_weights,
    megatron_layouts,
    megatron_tensors,
    model_configs,
    vllm_sizes,
    vllm_weight_slices,
    zeros_like,
)


def plan_of(row: RefitMapping, model: dict[str, Any], dtype: str = "bfloat16", **options: Any) -> RefitPlan:
    sources = [megatron_weight_slices(model, row.train, rank) for rank in range(row.train.world_size)]
    wanted = [vllm_weight_slices(model, VllmRank(row.tp, rank, fp8=row.fp8)) for rank in range(row.tp)] * row.dp
    return plan_refit(sources, wanted, dtype=dtype, **options)


def hosts_of(row: RefitMapping) -> list[int]:
    """The host of each rank: 8 GPUs per host, no host shared by both sides."""
    train, generation = row.train.world_size, row.tp * row.dp
    return [rank // 8 for rank in range(train)] + [-(-train // 8) + rank // 8 for rank in range(generation)]


FULL_IN_CI = {"4b-dp2pp2tp2-to-tp4dp2", "30b-dp2pp2tp2ep4etp1-to-tp8dp2", "4b-dp4tp2-to-tp4dp2-fp8"}
"""One of each kind of model."""


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (str(row) not in FULL_IN_CI)) for row in TABLE[:-2]], ids=str
)
def test_planned_at_full_size(row: RefitMapping) -> None:
    """Every generation rank receives what it holds; a replica receives the model plus what its ranks repeat.

    Across hosts of 8, in little more time than the busiest rank needs for its messages alone.
    """
    summary = plan_of(row, row.model, hosts=hosts_of(row)).summary()
    received = summary.received
    held = [0] * row.tp
    for rank in range(row.tp):
        for one in vllm_weight_slices(row.model, VllmRank(row.tp, rank, fp8=row.fp8)):
            size = {"float32": 4, "float8_e4m3fn": 1}.get(one.dtype, 2)
            held[rank] += size * _volume(one.box) + (4 * _volume(one.scales.local) if one.scales else 0)
    for index, count in enumerate(received):
        assert held[index % row.tp] <= count < 1.001 * held[index % row.tp] + 1000
    if row.tp == 1 and not row.fp8:
        assert abs(received[0] / (2 * parameters(row.model)) - 1) < 1e-4
    assert max(summary.sent) <= 1.2 * sum(summary.sent) / len(summary.sent)  # 1.18: FP8 does not quantize the embedding
    assert summary.floor_s <= summary.busiest_s
    assert 0.999 <= summary.schedule_s / summary.busiest_s <= 1.25
    assert summary.staging_bytes <= 2 * BUCKET_BYTES[1]


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    return int(torch.Size([stop - start for start, stop in box]).numel())


def parameters(model: dict[str, Any]) -> int:
    """Counts the parameters of the whole model that ranks are cut from."""
    return sum(torch.Size(shape).numel() for _, shape in hf_shapes(model))


def test_parameter_counts_are_the_published_ones() -> None:
    """Parameter counts of the model cards; DeepSeek-V3 without its prediction layer."""
    published = {4_022_468_096: QWEN3_4B, 30_532_122_624: QWEN3_30B, 235_093_634_560: QWEN3_235B}
    for count, model in published.items():
        assert parameters(model) == count
    assert abs(parameters(DEEPSEEK_V3) / 671_026_419_200 - 1) < 1e-5


DIRECT = [1, 300, 1500, DIRECT_BYTES]
"""Thresholds of direct messages at which all, many, few or no parts of these small models are direct."""


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_megatron_layout_into_any_vllm_layout(data: st.DataObject) -> None:
    config = data.draw(model_configs())
    layout = data.draw(megatron_layouts(config))
    plan = check_megatron_to_vllm(
        config,
        layout,
        data.draw(st.sampled_from(vllm_sizes(config))),
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from([1000, 4000, 1 << 20])),
        ep=data.draw(st.booleans()),
        ranks_a_host=data.draw(st.sampled_from([0, 0, 2, 3])),
        verify=data.draw(st.sampled_from(["off", "checksum"])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float64])),  # casts that keep all values distinct
        tied_head=data.draw(st.sampled_from(get_args(TiedHead))),
        direct_bytes=data.draw(st.sampled_from(DIRECT)),
        mapped=data.draw(st.booleans()),
    )
    assert pickle.loads(pickle.dumps(plan.for_rank(0))) == plan.for_rank(0)  # noqa: S301


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_megatron_layout_into_any_other(data: st.DataObject) -> None:
    config = data.draw(model_configs())
    first, second = (data.draw(megatron_layouts(config)) for _ in range(2))
    plan = plan_refit(
        megatron_slices(config, first),
        megatron_slices(config, second),
        dtype="float32",
        bucket_bytes=2000,
        direct_bytes=data.draw(st.sampled_from(DIRECT)),
    )
    weights = hf_weights(config)
    sources = [megatron_tensors(weights, config, first, rank) for rank in range(first.world_size)]
    expected = [megatron_tensors(weights, config, second, rank) for rank in range(second.world_size)]
    built = [zeros_like(tensors) for tensors in expected]
    run_refit(plan, [*sources, *built])
    assert all(equal(ours, theirs) for ours, theirs in zip(built, expected, strict=True))
