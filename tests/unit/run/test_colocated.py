"""What colocated workers keep on their GPU, on a simulated GPU that counts bytes and never holds more than it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dagrl.machine import DeviceMemory
from dagrl.run.colocated import ALL, GENERATION_PARTS, MARGIN, NONE, TRAIN_PARTS, Exchange, Residency, SharedDevices
from dagrl.runtime.deadline import Deadline

PARTS = {"weights": 10, "optimizer": 60, "gradients": 20}
GENERATION = {"weights": 10, "kv_cache": 190}
ACTIVATIONS = 50
ROLES = (("train",), ("train", "generation"), ("generation",))


class SimulatedGpu:
    """Counts the bytes of both sides, and is the worker group of both. A training phase caches memory."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.state: set[str] = set()
        self.cached = 0
        self.awake = set(GENERATION)
        self.calls: list[str] = []

    @property
    def used(self) -> int:
        return sum(PARTS[part] for part in self.state) + self.cached + sum(GENERATION[part] for part in self.awake)

    def call(self, method: str, *args: Any, deadline: Deadline) -> list[Any]:
        if method != "device_memory":
            self.calls.append(method)
        answer = getattr(self, method)(*args)
        assert self.used <= self.total, f"out of memory after {self.calls}"
        return [answer]

    def offload(self, parts: tuple[str, ...]) -> None:
        assert self.state >= set(parts)
        self.state -= set(parts)
        self.cached = 0

    def reload(self, parts: tuple[str, ...]) -> None:
        assert not self.state & set(parts)
        self.state |= set(parts)

    def sleep(self, level: int) -> int:
        assert self.awake == set(GENERATION), "vLLM falls asleep only from wide awake"
        self.awake = set()
        return sum(GENERATION.values())

    def wake_up(self, tags: tuple[str, ...]) -> None:
        self.awake |= set(tags)

    def device_memory(self) -> DeviceMemory | None:
        return DeviceMemory(self.total - self.used, self.total, PARTS)

    def work(self, roles: tuple[str, ...]) -> None:
        """Runs a phase of `roles`."""
        if roles == ("train",):
            assert self.state == set(TRAIN_PARTS)
            self.cached = ACTIVATIONS
        if roles == ("generation",):
            assert self.awake == set(GENERATION)
        if len(roles) == 2:
            assert "weights" in self.state and "weights" in self.awake
        assert self.used <= self.total, f"out of memory in {roles} after {self.calls}"


class HostAlone(SimulatedGpu):
    """A machine without a GPU."""

    def device_memory(self) -> None:
        return None


@contextmanager
def unmeasured(name: str) -> Iterator[None]:
    yield


def calls_of_a_step(gpu: SimulatedGpu, exchange: Exchange) -> list[str]:
    """Warms up, settles, and returns the calls of the third step after it."""
    shared = SharedDevices(gpu, gpu, 2, unmeasured, Deadline(1, "timeouts.replay_s"), exchange)  # type: ignore[arg-type]
    for roles in (("train", "generation"), ("generation",), ("train",)):
        shared.give_to(roles, keep_generation_weights=True)
        gpu.work(roles)
    shared.settle()
    for _ in range(3):
        gpu.calls.clear()
        for roles in ROLES:
            shared.give_to(roles)
            gpu.work(roles)
    return gpu.calls


def total_for(used: int) -> int:
    """The smallest GPU with `used` bytes and the margin."""
    return next(total for total in range(used, 2 * used) if int(MARGIN * total) + used <= total)


EVERYTHING = sum(PARTS.values()) + ACTIVATIONS + sum(GENERATION.values())
BOTH_STATES = sum(PARTS.values()) + sum(GENERATION.values())
WITHOUT_GRADIENTS = BOTH_STATES - PARTS["gradients"]
WEIGHTS_ALONE = PARTS["weights"] + sum(GENERATION.values())
SLEEP = ["sleep", "offload", "wake_up", "wake_up"]
PARTLY = ["sleep", "reload", "offload", "wake_up", "wake_up"]
WHOLLY = ["sleep", "reload", "offload", "wake_up", "offload", "wake_up"]


@pytest.mark.parametrize(
    ("total", "calls"),
    [
        pytest.param(total_for(EVERYTHING), [], id="everything fits"),
        pytest.param(total_for(EVERYTHING) - 1, SLEEP, id="both states fit, activations do not"),
        pytest.param(total_for(BOTH_STATES), SLEEP, id="the train state just fits next to generation"),
        pytest.param(total_for(WITHOUT_GRADIENTS), PARTLY, id="all but gradients fits"),
        pytest.param(total_for(WEIGHTS_ALONE), PARTLY, id="only the train weights fit"),
        pytest.param(total_for(WEIGHTS_ALONE) - 1, WHOLLY, id="nothing fits"),
    ],
)
def test_auto_keeps_what_fits(total: int, calls: list[str]) -> None:
    assert calls_of_a_step(SimulatedGpu(total), "auto") == calls


def test_always_and_never() -> None:
    assert calls_of_a_step(SimulatedGpu(10 * EVERYTHING), "always") == WHOLLY
    assert calls_of_a_step(SimulatedGpu(EVERYTHING), "never") == []
    with pytest.raises(AssertionError, match="out of memory"):
        calls_of_a_step(SimulatedGpu(EVERYTHING - 1), "never")


def test_auto_without_a_gpu_moves_nothing() -> None:
    assert calls_of_a_step(HostAlone(10 * EVERYTHING), "auto") == []


def test_what_is_held() -> None:
    weights = Residency(("weights",))
    assert [weights.held(roles) for roles in ROLES] == [
        (TRAIN_PARTS, ()),
        (("weights",), ("weights",)),
        (("weights",), GENERATION_PARTS),
    ]
    assert {ALL.held(roles) for roles in ROLES} == {(TRAIN_PARTS, GENERATION_PARTS)}
    assert NONE.held(("generation",)) == ((), GENERATION_PARTS)
