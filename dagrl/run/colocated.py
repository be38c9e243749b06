"""Exchanges GPU memory between the groups that share GPUs with generation (`policy.generation.colocated.enabled`).

    shared.give_to(("train",))                # before a training phase: generation sleeps, the train state comes back
    shared.give_to(("train", "generation"))   # before a refit: both hold weights, and what stays resident
    shared.give_to(("generation",))           # before a quantum: the train state goes to the host, the KV cache comes back
    shared.give_to(("critic",))               # a third group: the train state goes to the host, the critic's comes back

`Replays` calls this before each replay with the roles of its phase, so loops do not. Roles release their memory before
another acquires any. What fits next to the other roles stays where it is: `SharedDevices.settle` decides that from the
memory that was free while each phase was warmed up. A train state whose phases leave ample room for generation does not even
leave for the warm-up of generation. Without a GPU vLLM cannot sleep, and nothing moves.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from dagrl.config.roles import GENERATION, TRAIN
from dagrl.machine import DeviceMemory
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TRAIN_PARTS = (WEIGHTS, "optimizer", "gradients")
"""The parts of a train state, in the order in which they stay resident. Gradients come back as zeros, without a copy."""

GENERATION_PARTS = (WEIGHTS, KV_CACHE)

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""The sleep levels at which vLLM moves its weights to host memory, and at which it drops them, as a refit brings them."""

MARGIN = 0.03
"""The share of a GPU that stays free when memory is kept resident: allocators fragment, and libraries allocate late."""

AMPLE = 0.1
"""The share of a GPU that must be free next to training and generation if generation is warmed up there, unmeasured."""

Measure = Callable[[str], AbstractContextManager[None]]
Exchange = Literal["auto", "always", "never"]
Parts = tuple[str, ...]
Held = Mapping[str, Parts]
"""The parts that each role holds."""


@dataclass(frozen=True)
class Residency:
    """The parts that stay on the GPUs while other roles work. `roles` are those with a train state: all but generation.

    `generating` has the parts of each role that stay while generation works, `training` those that stay while another role
    works and generation sleeps. With `everything` nothing moves.
    """

    roles: Parts
    generating: Held = field(default_factory=dict)
    training: Held = field(default_factory=dict)
    everything: bool = False

    def held(self, working: Sequence[str]) -> Held:
        """Returns the parts that each role holds while a phase of the roles `working` runs."""
        if self.everything:
            return {**dict.fromkeys(self.roles, TRAIN_PARTS), GENERATION: GENERATION_PARTS}
        stays, others = self.generating if GENERATION in working else self.training, set(working) - {GENERATION}
        resident = {role: stays.get(role, ()) for role in self.roles}
        if GENERATION not in working:
            return {**resident, **dict.fromkeys(others, TRAIN_PARTS), GENERATION: ()}
        senders = {role: resident[role] or (WEIGHTS,) for role in others}
        return {**resident, **senders, GENERATION: (WEIGHTS,) if senders else GENERATION_PARTS}

    def __str__(self) -> str:
        if self.everything:
            return "all of it stays on the GPUs; policy.generation.colocated.exchange=never would start faster"
        return f"{_text(self.generating)} during generation, {_text(self.training)} while another role trains"


def _text(stays: Held) -> str:
    kept = [f"{' and '.join(parts)} of {role}" for role, parts in stays.items() if parts]
    return f"{', '.join(kept) or 'nothing'} stays"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


@dataclass(frozen=True)
class MeasuredMemory:
    """Free bytes of one GPU after the phases of each role (`free`), each without the other roles' memory.

    `generation` is what generation gives up when it sleeps, `parts` what each part of each train state takes.
    """

    total: int
    parts: Mapping[str, Mapping[str, int]]
    generation: int
    free: Mapping[str, int]

    def __str__(self) -> str:
        states = [f"{role} {_gib(sum(parts.values()))}" for role, parts in self.parts.items()]
        free = ", ".join(f"{_gib(size)} with {role} alone" for role, size in self.free.items())
        return f"{', '.join(states)}, {GENERATION} {_gib(self.generation)}; of {_gib(self.total)} are free {free}"

    def residency(self) -> Residency:
        """Returns what stays resident: everything, or as many parts of the train states as fit next to each role."""
        roles, margin = tuple(self.parts), int(MARGIN * self.total)
        room = {role: free - margin for role, free in self.free.items()}
        states = {role: sum(parts.values()) for role, parts in self.parts.items()}
        others = self.generation + sum(states.values())
        if all(others - states[role] <= room[role] for role in roles):
            return Residency(roles, everything=True)
        generating = self._kept({GENERATION: room.pop(GENERATION)})
        return Residency(roles, generating, self._kept(room))

    def _kept(self, room: dict[str, int]) -> Held:
        """Returns the parts of each role that fit next to the other roles in `room` (free bytes by role), weights first."""
        kept: dict[str, Parts] = dict.fromkeys(self.parts, ())
        full = set[str]()
        for part in TRAIN_PARTS:
            for role in kept:
                size, beside = self.parts[role][part], [other for other in room if other != role]
                if role in full or any(room[other] < size for other in beside):
                    full.add(role)
                    continue
                kept[role] += (part,)
                room.update({other: room[other] - size for other in beside})
        return kept


class SharedDevices:
    """See the module's docstring. `measure(name)` counts the time of exchanges; `deadline` limits each call.

    `states` are the groups with a train state, by role: `train`, and a critic or a teacher on the same GPUs. The callbacks
    of `before_sleep` run while generation still has its memory, so that work in flight can end; `finish(role)` waits for
    the replays in flight of a role with a train state. At first generation holds all its parts, and the train states are on
    the host, or with `resident` on the GPU, from where nothing moves until `measure_turns`.
    """

    def __init__(
        self,
        states: Mapping[str, WorkerGroup],
        generation: WorkerGroup,
        sleep_level: int,
        measure: Measure,
        deadline: Deadline,
        exchange: Exchange = "auto",
        resident: bool = False,
    ) -> None:
        self._states, self._generation = states, generation
        self._level, self._measure, self._deadline = sleep_level, measure, deadline
        self.before_sleep: list[Callable[[], None]] = []
        self.finish: Callable[[str], None] = lambda role: None
        self._none = Residency(tuple(states))
        self._settled, self._still = exchange != "auto", exchange == "never"
        self._held: dict[str, Parts] = dict.fromkeys(states, TRAIN_PARTS if resident else ())
        self._held[GENERATION] = GENERATION_PARTS
        self._residency = self._everything if resident else self._none
        self._caching = set[str]()  # roles that have computed, and not released the memory that no tensor uses
        self._free: dict[str, list[DeviceMemory]] = {}
        self._freed_by_sleep: list[int] = []

    def give_to(self, roles: Sequence[str], *, keep_generation_weights: bool = False) -> None:
        """Moves the parts that a phase of `roles` needs to the GPU. Roles on other GPUs are ignored.

        Pass `keep_generation_weights` if no refit follows: generation then continues with the weights it has.
        """
        working = [role for role in roles if role in self._held]
        if not working:
            return
        self._note()
        if GENERATION in working and self._has_ample_room():
            self._residency = self._everything
        wanted = self._residency.held(working)
        if self._held[GENERATION] == (WEIGHTS,) and not wanted[GENERATION]:
            self.give_to((GENERATION,))  # vLLM falls asleep only from wide awake
        leaving = self._leaving(wanted, working)
        if leaving or wanted != self._held:
            for role in leaving:
                self.finish(role)
            with self._measure("exchange"):
                dropped = not keep_generation_weights and GENERATION not in working
                self._release(wanted, leaving, self._level if dropped else KEEP_WEIGHTS)
                for role, group in {**self._states, GENERATION: self._generation}.items():
                    if missing := tuple(part for part in wanted[role] if part not in self._held[role]):
                        group.call("wake_up" if role == GENERATION else "reload", missing, deadline=self._deadline)
                    self._held[role] = wanted[role]
        if GENERATION not in working:
            self._caching.update(working)

    @property
    def roles(self) -> Parts:
        """The roles that take turns."""
        return tuple(self._held)

    @property
    def moves(self) -> bool:
        """Whether anything may have to move before a role works: not all of it stays on the GPUs for good."""
        return not (self._settled and self._residency.everything)

    @property
    def _everything(self) -> Residency:
        return Residency(tuple(self._states), everything=True)

    def _leaving(self, wanted: Held, working: Sequence[str]) -> dict[str, Parts]:
        """Returns the parts that each train state releases; an empty tuple releases cached memory alone."""
        gone = {role: tuple(part for part in self._held[role] if part not in wanted[role]) for role in self._states}
        wakes = not self._residency.everything and set(wanted[GENERATION]) > set(self._held[GENERATION])
        caching = {role for role in self._caching if wakes or (GENERATION not in working and role not in working)}
        return {role: parts for role, parts in gone.items() if parts or (role in caching and not self._still)}

    def measure_turns(self) -> None:
        """Lets roles take turns until `settle`, which needs the memory that is free while each is alone."""
        if not self._settled:
            self._residency = self._none

    def _has_ample_room(self) -> bool:
        """Returns whether generation, now asleep, surely fits next to the only train state and its cached memory."""
        if self._settled or len(self._states) > 1 or self._held[GENERATION] or not self._caching:
            return False
        memory = self._free[TRAIN]
        return bool(memory) and max(self._freed_by_sleep) <= min(gpu.free - AMPLE * gpu.total for gpu in memory)

    def settle(self) -> None:
        """Decides what stays resident from now on, after each phase has run once at its largest shape."""
        if self._settled:
            return
        if self._residency.everything:
            memory = self._memory(TRAIN)
            if all(gpu.free >= MARGIN * gpu.total for gpu in memory):
                self._settled = True
                for room, size in sorted((gpu.free, gpu.total) for gpu in memory)[:1]:  # none without a GPU
                    logger.info("memory of colocated workers: %s (%s of %s free)", self._residency, _gib(room), _gib(size))
                return
            self.measure_turns()
            for role in (TRAIN, GENERATION):
                self.give_to((role,), keep_generation_weights=True)
        self._note()
        self._settled = True
        if not all(self._free.get(role) for role in self._held):  # no GPU: there is nothing to exchange
            self._residency, self._still = self._everything, True
            return
        free = {role: min(gpu.free for gpu in gpus) for role, gpus in self._free.items()}
        parts = {
            role: {part: max(gpu.parts[part] for gpu in self._free[role]) for part in TRAIN_PARTS} for role in self._states
        }
        total = min(gpu.total for gpus in self._free.values() for gpu in gpus)
        measured = MeasuredMemory(total, parts, max(self._freed_by_sleep), free)
        self._residency = measured.residency()
        logger.info("memory of colocated workers: %s (%s)", self._residency, measured)

    def _note(self) -> None:
        """Notes how much memory is free next to a role that is alone, until `settle`."""
        alone = [role for role in self._held if self._held == self._none.held((role,))]
        for role in () if self._settled else alone:
            self._free.setdefault(role, []).extend(self._memory(role))

    def _memory(self, role: str) -> list[DeviceMemory]:
        group = self._states.get(role) or next(iter(self._states.values()))
        return [memory for memory in group.call("device_memory", deadline=self._deadline) if memory is not None]

    def _release(self, wanted: Held, leaving: Mapping[str, Parts], level: int) -> None:
        for role, gone in leaving.items():
            self._states[role].call("offload", gone, deadline=self._deadline)
            self._held[role] = tuple(part for part in self._held[role] if part not in gone)
        self._caching -= leaving.keys()
        if set(self._held[GENERATION]) - set(wanted[GENERATION]):  # vLLM sleeps as a whole
            for ended in self.before_sleep:
                ended()
            freed = self._generation.call("sleep", level, deadline=self._deadline)
            logger.debug("generation sleeps at level %d; bytes freed by rank: %s", level, freed)
            self._freed_by_sleep = freed
            self._held[GENERATION] = ()
