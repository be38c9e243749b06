"""The engine's own loader, in a process of its own, describes what refits plan."""

from __future__ import annotations

import pytest
import torch

from dagrl.config import Config
from dagrl.refit import TIED_HEAD, plan_refit
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.vllm import VllmWorker
from tests.families import FAMILIES
from tests.unit.refit.memory_channel import run_refit


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, pp=2), ParallelLayout(pp=2, vpp=2, dp=2)], ids=ParallelLayout.describe
)
def test_scales_of_an_fp8_cache_are_sent_like_weights(layout: ParallelLayout) -> None:
    """Every rank of an engine gets the scales of all layers, from all pipeline stages."""
    hf_config = {**FAMILIES["qwen3"], "num_hidden_layers": 4}
    engine = {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2}
    policy = {"precision": "bfloat16", "generation": {"vllm_cfg": engine}}
    config = Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": policy})
    sources = [MegatronWorker.describe(config, hf_config, layout, rank) for rank in range(layout.world_size)]
    wanted = [VllmWorker.describe(config, hf_config, ParallelLayout(tp=2), rank) for rank in range(2)]
    plan_refit(sources, wanted, dtype="bfloat16", aliases=TIED_HEAD)  # together with all weights, which have another dtype

    def scales(slices: list[WeightSlice]) -> list[WeightSlice]:
        return [one for one in slices if one.name.endswith("_scale")]

    def value(one: WeightSlice) -> torch.Tensor:
        return torch.tensor([int(one.name.split(".")[2]) + (0.25 if "k_scale" in one.name else 0.5)])

    plan = plan_refit([scales(mine) for mine in sources], [scales(mine) for mine in wanted], dtype="bfloat16")
    held = [{one.tensor: value(one) for one in scales(mine)} for mine in sources]
    received = [{one.tensor: torch.zeros(1) for one in scales(mine)} for mine in wanted]
    run_refit(plan, [*held, *received], verify="checksum")
    for mine, tensors in zip(wanted, received, strict=True):
        assert len(tensors) == 8
        assert all(torch.equal(tensors[one.tensor], value(one)) for one in scales(mine))
