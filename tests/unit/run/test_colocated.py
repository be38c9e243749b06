"""What colocated workers keep on their GPU, on a simulated GPU that counts bytes and never holds more than it has."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from dagrl.machine import DeviceMemory
from dagrl.run.colocated import AMPLE, MARGIN, TRAIN_PARTS, Exchange, MeasuredMemory, SharedDevices
from dagrl.runtime.deadline import Deadline

PARTS = {"weights": 10, "optimizer": 60, "gradients": 20}
GENERATION = {"weights": 10, "kv_cache": 190}
SIZES = {
    "train": PARTS,
    "critic": {"weights": 8, "optimizer": 30, "gradients": 10},
    "teacher": {"weights": 40, "optimizer": 0, "gradients": 0},
    "generation": GENERATION,
}
STATES = ("train", "critic", "teacher")
ACTIVATIONS = 50
ROLES = (("train",), ("train", "generation"), ("generation",))
DEADLINE = Deadline(1, "timeouts.replay_s")


class SimulatedGpu:
    """Counts the bytes of generation and of train states, each of whose phases caches `ACTIVATIONS` until an offload."""

    def __init__(self, total: int, *states: str, measures: bool = True) -> None:
        self.total, self.measures = total, measures
        self.held: dict[str, set[str]] = {**{role: set() for role in states}, "generation": set(GENERATION)}
        self.cached = dict.fromkeys(states, 0)
        self.running = set[str]()
        self.moved = list[tuple[str, str]]()

    def shared(self, exchange: Exchange, resident: bool = False) -> SharedDevices:
        """Shares it between a group of one worker for each role."""
        groups: dict[str, Any] = {role: Group(self, role) for role in self.held}
        generation = groups.pop("generation")
        shared = SharedDevices(groups, generation, 2, unmeasured, DEADLINE, exchange, resident)
        shared.finish = self.running.discard
        return shared

    @property
    def free(self) -> int:
        used = sum(SIZES[role][part] for role, parts in self.held.items() for part in parts)
        return self.total - used - sum(self.cached.values())

    def called(self, role: str, method: str, *args: Any) -> Any:
        if method == "device_memory":
            return DeviceMemory(self.free, self.total, SIZES[role]) if self.measures else None
        assert role not in self.running, f"{method} of {role} while its replay runs"
        self.moved.append((role, method))
        if method in ("offload", "sleep"):
            gone = set(args[0]) if method == "offload" else set(GENERATION)
            assert self.held[role] >= gone
            self.held[role] -= gone
            self.cached[role] = 0
            return sum(GENERATION.values())
        assert not self.held[role] & set(args[0])
        self.held[role] |= set(args[0])
        assert self.free >= 0, f"out of memory after {self.moved}"
        return None

    def work(self, roles: tuple[str, ...]) -> None:
        """Begins a phase of `roles`, which runs until `finish`."""
        if len(roles) == 2:
            assert all("weights" in self.held[role] for role in roles)
        else:
            assert self.held[roles[0]] == set(SIZES[roles[0]]), roles
            if roles[0] in STATES:
                self.cached[roles[0]] = ACTIVATIONS
                self.running.add(roles[0])
        assert self.free >= 0, f"out of memory in {roles} after {self.moved}"


class Group:
    def __init__(self, gpu: SimulatedGpu, role: str) -> None:
        self.gpu, self.role = gpu, role

    def call(self, method: str, *args: Any, deadline: Deadline) -> list[Any]:
        return [self.gpu.called(self.role, method, *args)]


@contextmanager
def unmeasured(name: str) -> Iterator[None]:
    yield


def calls_of_a_step(gpu: SimulatedGpu, exchange: Exchange) -> list[str]:
    """Warms up, settles, and returns the calls of the third step after it. With `never` the state is there at first."""
    shared = started(gpu, exchange, exchange == "never")
    shared.measure_turns()
    warm_up(gpu, shared, 0, ("train", "generation"), ("generation",), ("train",))
    return third_step(gpu, shared)


def started(gpu: SimulatedGpu, exchange: Exchange, resident: bool) -> SharedDevices:
    if resident:
        gpu.held["train"] = set(TRAIN_PARTS)
    return gpu.shared(exchange, resident)


def warm_up(gpu: SimulatedGpu, shared: SharedDevices, late: int, *turns: tuple[str, ...]) -> None:
    """Runs phases of these roles and of a judge on other GPUs, then settles. Generation's first takes `late` bytes."""
    for roles in turns:
        shared.give_to((*roles, "judge"), keep_generation_weights=True)
        gpu.work(roles)
        gpu.total -= late * (roles == ("generation",))
    shared.settle()


def third_step(gpu: SimulatedGpu, shared: SharedDevices) -> list[str]:
    run_steps(gpu, shared, ROLES)
    assert shared.moves == bool(gpu.moved)
    return [method for _, method in gpu.moved]


def run_steps(gpu: SimulatedGpu, shared: SharedDevices, turns: Sequence[tuple[str, ...]]) -> None:
    """Runs three steps of these turns. `moved` has the calls of the last one."""
    for _ in range(3):
        gpu.moved.clear()
        for roles in turns:
            shared.give_to(roles)
            gpu.work(roles)


def total_for(used: int) -> int:
    """Returns the smallest GPU with `used` bytes and the margin."""
    return next(total for total in range(used, 2 * used) if int(MARGIN * total) + used <= total)


EVERYTHING = sum(PARTS.values()) + ACTIVATIONS + sum(GENERATION.values())
BOTH_STATES = sum(PARTS.values()) + sum(GENERATION.values())
WITHOUT_GRADIENTS = BOTH_STATES - PARTS["gradients"]
WEIGHTS_ALONE = PARTS["weights"] + sum(GENERATION.values())
SLEEP = ["sleep", "offload", "wake_up", "wake_up"]
PARTLY = ["sleep", "reload", "offload", "wake_up", "wake_up"]
WHOLLY = ["sleep", "reload", "offload", "wake_up", "offload", "wake_up"]


FITS = {
    "everything": (total_for(EVERYTHING), []),
    "both states, but not activations": (total_for(EVERYTHING) - 1, SLEEP),
    "the train state, just next to generation": (total_for(BOTH_STATES), SLEEP),
    "all but gradients": (total_for(WITHOUT_GRADIENTS), PARTLY),
    "only the train weights": (total_for(WEIGHTS_ALONE), PARTLY),
    "nothing": (total_for(WEIGHTS_ALONE) - 1, WHOLLY),
}


@pytest.mark.parametrize(("total", "calls"), FITS.values(), ids=FITS)
def test_auto_keeps_what_fits(total: int, calls: list[str]) -> None:
    assert calls_of_a_step(SimulatedGpu(total, "train"), "auto") == calls
    assert calls_of_a_step(SimulatedGpu(10 * EVERYTHING, "train", measures=False), "auto") == [], "without a GPU"


ALONE = ["sleep", "offload", "wake_up"]
MEASURED = [*ALONE, "sleep", "reload", "wake_up"]
AMPLY = next(total for total in range(EVERYTHING, 2 * EVERYTHING) if total - EVERYTHING >= AMPLE * total)


@pytest.mark.parametrize(
    ("total", "late", "at_start", "calls"),
    [
        pytest.param(AMPLY, 0, ["sleep", "wake_up"], [], id="ample room"),
        pytest.param(AMPLY, 20, ["sleep", "wake_up"], [], id="ample room that is used later"),
        pytest.param(AMPLY, 35, ["sleep", "wake_up", *ALONE], SLEEP, id="less than the margin is left"),
        pytest.param(AMPLY - 1, 0, MEASURED, [], id="everything fits"),
        pytest.param(total_for(BOTH_STATES), 0, MEASURED, SLEEP, id="activations do not fit"),
    ],
)
def test_a_start_with_both_roles_moves_nothing_that_fits(total: int, late: int, at_start: Any, calls: Any) -> None:
    """Planning a refit, then the warm-up in the order of a run. Generation takes `late` more bytes than at its start."""
    gpu = SimulatedGpu(total, "train")
    shared = started(gpu, "auto", resident=True)
    shared.give_to(("train", "generation"))
    assert gpu.moved == []
    shared.measure_turns()
    warm_up(gpu, shared, late, ("train",), ("generation",), ("train", "generation"))
    assert [method for _, method in gpu.moved] == at_start
    assert third_step(gpu, shared) == calls


def test_exchange_always_and_never() -> None:
    assert calls_of_a_step(SimulatedGpu(10 * EVERYTHING, "train"), "always") == WHOLLY
    assert calls_of_a_step(SimulatedGpu(EVERYTHING, "train"), "never") == []
    with pytest.raises(AssertionError, match="out of memory"):
        calls_of_a_step(SimulatedGpu(EVERYTHING - 1, "train"), "never")


STEP = (("critic",), ("train",), ("teacher",), ("critic",), ("train",), ("train", "generation"), ("generation",))


def turns_of_a_step(total: int, exchange: Exchange) -> list[tuple[str, str]]:
    """Returns what moves in the third step of PPO with a teacher, after the warm-up."""
    gpu = SimulatedGpu(total, *STATES)
    shared = gpu.shared(exchange)
    warm_up(gpu, shared, 0, ("train", "generation"), ("generation",), ("train",), ("critic",), ("teacher",))
    run_steps(gpu, shared, STEP)
    return gpu.moved


ALL_STATES = sum(sum(SIZES[role].values()) for role in STATES)


def test_three_states_and_generation_take_turns_on_one_gpu() -> None:
    """Never more than the GPU has, never two states at once, and a running replay ends before its memory leaves."""
    smallest = total_for(90 + ACTIVATIONS)
    with pytest.raises(AssertionError, match="out of memory"):
        turns_of_a_step(sum(GENERATION.values()) - 1, "always")
    always = turns_of_a_step(max(smallest, sum(GENERATION.values())), "always")
    assert always == [
        *[("generation", "sleep"), ("critic", "reload"), ("critic", "offload"), ("train", "reload")],
        *[("train", "offload"), ("teacher", "reload"), ("teacher", "offload"), ("critic", "reload")],
        *[("critic", "offload"), ("train", "reload"), ("train", "offload"), ("generation", "wake_up")],
        *[("train", "offload"), ("generation", "wake_up")],
    ]


@pytest.mark.parametrize("total", [200, 210, 260, 300, 350, 400, 450, 500])
def test_three_states_keep_what_fits(total: int) -> None:
    """More memory never moves more, and with enough of it only caches are dropped."""
    moved = turns_of_a_step(total, "auto")
    reloaded = [role for role, what in moved if what in ("reload", "wake_up")]
    assert len(reloaded) <= len([one for one in turns_of_a_step(200, "auto") if one[1] in ("reload", "wake_up")])
    if total >= total_for(ALL_STATES + sum(GENERATION.values()) + ACTIVATIONS):
        assert {what for _, what in moved} == {"offload"}


def test_weights_stay_first() -> None:
    """A teacher's weights may stay where an optimizer does not fit."""
    parts = {role: SIZES[role] for role in STATES}
    measured = MeasuredMemory(1000, parts, 500, {"generation": 30 + 60, "train": 60 + 30, "critic": 30, "teacher": 30})
    found = measured.residency()
    assert not found.everything
    assert found.generating == {"train": ("weights",), "critic": ("weights",), "teacher": TRAIN_PARTS}  # the rest is empty
