"""Connecting two groups: equal slice lists are sent once, and impossible channels are rejected before they are opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagrl.channels.spec import ChannelKind
from dagrl.errors import RefitPlanError
from dagrl.refit import Refit, plan_refit
from dagrl.refit.connect import check_devices, choose_kind, device_of, distinct_slices
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.executors.node import install
from dagrl.runtime.worker_group import WorkerGroup
from tests.families import FAMILIES
from tests.unit.refit.weight_reference import VllmRank, vllm_weight_slices


class Worker:
    def __init__(self, slices: Sequence[WeightSlice]) -> None:
        self.slices = slices

    def weight_slices(self) -> list[WeightSlice]:
        return list(self.slices)


class Group:
    """Has `call_function` like a worker group, and counts the returned slices."""

    def __init__(self, slices: Sequence[Sequence[WeightSlice]]) -> None:
        self.workers = [Worker(one) for one in slices]
        self.role = SimpleNamespace(name="generation")
        self.returned = 0
        for rank, worker in enumerate(self.workers):
            install(worker, "generation", rank, "")

    def call_function(self, function: Callable[..., Any], *args: object) -> list[Any]:
        results = [function(worker, *args) for worker in self.workers]
        self.returned += sum(len(result) for result in results if isinstance(result, list))
        return results


def test_workers_without_the_methods_of_a_refit_are_refused() -> None:
    group = SimpleNamespace(role=SimpleNamespace(name="generation", methods={"weight_slices": None}))
    with pytest.raises(RefitPlanError, match="the generation worker has no prepare_refit, which a refit calls"):
        Refit.connect(cast(WorkerGroup, group), cast(WorkerGroup, group), dtype="float32")


def test_replicas_send_their_slices_once() -> None:
    config = FAMILIES["qwen3_moe"]
    two = [vllm_weight_slices(config, VllmRank(2, rank)) for rank in range(2)]
    group = Group(two * 4)
    found = distinct_slices(cast(WorkerGroup, group))
    assert found == two * 4
    assert group.returned == sum(map(len, two))
    assert all(found[rank] is found[rank % 2] for rank in range(8))  # one object, so that the plan intersects it once
    plan = plan_refit([vllm_weight_slices(config, VllmRank())], found, dtype="float32")
    assert plan.destinations == 8


@pytest.mark.parametrize(
    ("kind", "hosts", "devices", "message"),
    [
        ("ipc", [0, 1], ["a", "a"], "joins processes of one host, but the workers are on 2 hosts; put"),
        ("nccl", [0, 0, 0], ["a", "b", "a"], "ranks 0 and 2 of the refit share GPU a, which NCCL does not support; set"),
        ("nccl", [0, 0], ["a", ""], "an nccl channel joins GPUs, but rank 1 of the refit has its weights on a CPU; put the"),
    ],
)
def test_a_channel_that_cannot_join_the_ranks_is_rejected(
    kind: ChannelKind, hosts: list[int], devices: list[str], message: str
) -> None:
    with pytest.raises(RefitPlanError, match=message):
        check_devices(kind, hosts, devices)


@pytest.mark.parametrize(("devices", "kind"), [(["", ""], "gloo"), (["a", "b"], "nccl"), (["a", "b", "a"], "ipc")])
def test_the_kind_follows_from_the_devices(devices: list[str], kind: ChannelKind) -> None:
    assert choose_kind(devices) == kind
    check_devices(kind, [0] * len(devices), devices)


def test_a_worker_without_tensors_is_on_no_gpu() -> None:
    assert device_of(Worker([])) == ""
