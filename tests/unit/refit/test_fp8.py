"""Random refits into blockwise FP8 engines: bytes and scales equal those of the whole model, quantized and then split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dagrl.errors import RefitPlanError
from dagrl.refit import plan_refit
from dagrl.refit.slices import WeightSlice, expand
from dagrl.workers.families.megatron import MegatronModules
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.unit.refit.fp8_reference import cuts_a_block, fp8_configs, fp8_tensors, quantized_model, random_weights
from tests.unit.refit.memory_channel import copy_mapped, run_refit
from tests.unit.refit.weight_reference import (
    Config,
    VllmRank,
    Weights,
    megatron_layouts,
    megatron_tensors,
    vllm_sizes,
    vllm_weight_slices,
)

FP8 = torch.float8_e4m3fn
Slices = list[list[WeightSlice]]


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_megatron_layout_into_any_engine_in_fp8(data: st.DataObject) -> None:
    """Equals the whole model's quantization bit for bit; rejected exactly if a shard of either side splits a block."""
    config, dtype = data.draw(fp8_configs()), data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    whole, modules = random_weights(config, dtype), MegatronModules(data.draw(st.booleans()), data.draw(st.booleans()))
    for _ in range(data.draw(st.sampled_from([6, 6, 6, 1]))):  # usually until one fits
        layout = data.draw(megatron_layouts(config, limit=4))
        tp, ep = data.draw(st.sampled_from(vllm_sizes(config)[::-1])), data.draw(st.booleans())
        held = [megatron_weight_slices(config, layout, rank, modules) for rank in range(layout.world_size)]
        fits = not is_cut(whole, config, held, tp, ep)
        if fits:
            break
    ranks = [VllmRank(tp, rank, expert_parallel=ep, fp8=True) for rank in range(tp)] * data.draw(st.integers(1, 2))
    size, in_host = layout.world_size + len(ranks), data.draw(st.sampled_from([1, 2, 8]))
    options = {
        "dtype": str(dtype).removeprefix("torch."),
        "bucket_bytes": data.draw(st.sampled_from([40_000, 1 << 20])),
        "hosts": [rank // in_host for rank in range(size)],
    }
    if not fits:
        with pytest.raises(RefitPlanError, match="inside an FP8 block"):
            plan_refit(held, [vllm_weight_slices(config, rank) for rank in ranks], **options)
        return
    wanted = [vllm_weight_slices(config, rank) for rank in ranks]
    plan = plan_refit(held, wanted, **options)
    sources = [megatron_tensors(whole, config, layout, rank, modules) for rank in range(layout.world_size)]
    model = quantized_model(whole)
    expected = [expected_on(rank, model, config, mine, dtype) for rank, mine in zip(ranks, wanted, strict=True)]
    built = [{name: empty_like(tensor) for name, tensor in tensors.items()} for tensors in expected]
    if data.draw(st.booleans()) and all(bucket.source < plan.sources for bucket in plan.buckets):
        copy_mapped(plan, [*sources, *built])
    else:
        run_refit(plan, [*sources, *built], verify=data.draw(st.sampled_from(["off", "checksum"])))
    for ours, theirs in zip(built, expected, strict=True):
        assert [name for name in theirs if not torch.equal(as_stored(ours[name]), theirs[name])] == []


def is_cut(whole: Weights, config: Config, held: Slices, tp: int, ep: bool) -> bool:
    """Returns whether a shard of either side splits a block."""
    plain = [vllm_weight_slices(config, VllmRank(tp, rank, expert_parallel=ep)) for rank in range(tp)]
    sides = ((held, False), (plain, True))
    return any(cuts_a_block(whole, mine, local) for ranks, local in sides for mine in ranks)


def expected_on(
    rank: VllmRank, model: tuple[Weights, Weights], config: Config, slices: list[WeightSlice], dtype: torch.dtype
) -> Weights:
    """The tensors that vLLM holds. Unquantized ones have the engine's dtype, or the one in their slices."""
    tensors = fp8_tensors(model, config, rank.tp, rank.tp_rank, rank.expert_parallel)
    kept = {one.tensor for one in expand(slices) if one.dtype}
    for name, tensor in tensors.items():
        if name not in kept and not name.endswith("_scale_inv"):
            tensors[name] = tensor.to(dtype)
    return tensors


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocates an engine's memory for the tensors of `fp8_tensors`."""
    zeros = torch.zeros_like(tensor)
    return zeros.view(FP8) if tensor.dtype == torch.uint8 else zeros


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
