"""Joining two groups: equal descriptions are sent once, and channels that cannot be are refused before they are opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from dagrl.config import Config
from dagrl.errors import RefitPlanError
from dagrl.executors.node import install
from dagrl.layout import ParallelLayout
from dagrl.refit import plan_refit
from dagrl.refit.connect import ChannelKind, check_devices, device_of, distinct_slices
from dagrl.refit.plan import TIED_HEAD
from dagrl.refit.slices import WeightSlice
from dagrl.worker_group import WorkerGroup
from tests.families import FAMILIES
from tests.unit.memory_channel import run_refit
from workers.families.vllm import VllmRank
from workers.megatron import MegatronWorker
from workers.vllm import VllmWorker
from workers.vllm.weights import vllm_weight_slices


class Worker:
    def __init__(self, slices: Sequence[WeightSlice]) -> None:
        self.slices = slices

    def weight_slices(self) -> list[WeightSlice]:
        return list(self.slices)


class Group:
    """`call_function` as a worker group has it, with a count of what came back."""

    def __init__(self, slices: Sequence[Sequence[WeightSlice]]) -> None:
        self.workers = [Worker(one) for one in slices]
        self.came = 0
        for rank, worker in enumerate(self.workers):
            install(worker, "generation", rank, "")

    def call_function(self, function: Callable[..., Any], *args: object) -> list[Any]:
        results = [function(worker, *args) for worker in self.workers]
        self.came += sum(len(result) for result in results if isinstance(result, list))
        return results


def test_replicas_send_what_they_hold_once() -> None:
    config = FAMILIES["qwen3_moe"]
    two = [vllm_weight_slices(config, VllmRank(2, rank)) for rank in range(2)]
    group = Group(two * 4)
    found = distinct_slices(cast(WorkerGroup, group))
    assert found == two * 4
    assert group.came == sum(map(len, two))
    assert all(found[rank] is found[rank % 2] for rank in range(8))  # one object, which a plan intersects once
    plan = plan_refit([vllm_weight_slices(config, VllmRank())], found, dtype="float32")
    assert plan.destinations == 8


@pytest.mark.parametrize(
    ("kind", "hosts", "devices", "message"),
    [
        ("ipc", [0, 1], ["a", "a"], "an ipc channel joins processes of one host, but the workers are on 2; place colocated"),
        ("nccl", [0, 0, 0], ["a", "b", "a"], "ranks 0 and 2 of the refit share GPU a, which NCCL refuses; set policy"),
        ("nccl", [0, 0], ["a", ""], "an nccl channel joins GPUs, but rank 1 of the refit has its weights on a CPU; use"),
    ],
)
def test_a_channel_that_cannot_join_the_ranks(kind: ChannelKind, hosts: list[int], devices: list[str], message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        check_devices(kind, hosts, devices)


@pytest.mark.parametrize(
    ("kind", "devices"), [("ipc", ["a", "a"]), ("ipc", ["", ""]), ("gloo", ["", ""]), ("nccl", ["a", "b"])]
)
def test_channels_that_can(kind: ChannelKind, devices: list[str]) -> None:
    check_devices(kind, [0, 0], devices)


def test_a_worker_without_tensors_of_its_own_is_on_no_gpu() -> None:
    assert device_of(Worker([])) == ""


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, pp=2), ParallelLayout(pp=2, vpp=2, dp=2)], ids=ParallelLayout.describe
)
def test_scales_of_an_fp8_cache_are_carried_like_weights(layout: ParallelLayout) -> None:
    """Every rank of an engine gets the scales of all layers, whichever stage they come from."""
    hf_config = {**FAMILIES["qwen3"], "num_hidden_layers": 4}
    engine = {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2}
    policy = {"precision": "bfloat16", "generation": {"vllm_cfg": engine}}
    config = Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": policy})
    sources = [MegatronWorker.describe(config, hf_config, layout, rank) for rank in range(layout.world_size)]
    wanted = [VllmWorker.describe(config, hf_config, ParallelLayout(tp=2), rank) for rank in range(2)]
    plan_refit(sources, wanted, dtype="bfloat16", aliases=TIED_HEAD)  # beside all weights, whose dtype is another

    def scales(slices: list[WeightSlice]) -> list[WeightSlice]:
        return [one for one in slices if one.name.endswith("_scale")]

    def value(one: WeightSlice) -> torch.Tensor:
        return torch.tensor([int(one.name.split(".")[2]) + (0.25 if "k_scale" in one.name else 0.5)])

    plan = plan_refit([scales(mine) for mine in sources], [scales(mine) for mine in wanted], dtype="bfloat16")
    held = [{one.tensor: value(one) for one in scales(mine)} for mine in sources]
    received = [{one.tensor: torch.zeros(1) for one in scales(mine)} for mine in wanted]
    run_refit(plan, [*held, *received], verify="bitwise")
    for mine, tensors in zip(wanted, received, strict=True):
        assert len(tensors) == 8
        assert all(torch.equal(tensors[one.tensor], value(one)) for one in scales(mine))
