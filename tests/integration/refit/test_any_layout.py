"""Any Megatron layout into any other and into any vLLM layout: every element arrives, bit for bit."""

from __future__ import annotations

import pickle
from typing import get_args

import torch
from hypothesis import given, settings, strategies as st

from dagrl.refit import plan_refit
from dagrl.refit.transfers import DIRECT_BYTES
from tests.unit.refit.memory_channel import run_refit
from tests.unit.refit.test_plan import TiedHead, check_megatron_to_vllm, megatron_slices
from tests.unit.refit.weight_reference import (
    equal,
    hf_weights,
    megatron_layouts,
    megatron_tensors,
    model_configs,
    vllm_sizes,
    zeros_like,
)

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
