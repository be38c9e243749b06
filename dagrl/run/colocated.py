"""Exchanges GPU memory between train and generation workers that share GPUs (`policy.generation.colocated.enabled`).

    shared.give_to(("train",))                # before a training phase: generation sleeps, the train state comes back
    shared.give_to(("train", "generation"))   # before a refit: both hold weights, and what stays resident
    shared.give_to(("generation",))           # before a quantum: the train state goes to the host, the KV cache comes back

`Replays` calls this before each replay with the roles of its phase, so loops do not. One role releases its memory before the
other acquires any. What fits next to the other role stays where it is: `SharedDevices.settle` decides that from the memory
that was free while each phase was warmed up. Without a GPU vLLM cannot sleep, and nothing moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from dagrl.machine import DeviceMemory
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TRAIN_PARTS = (WEIGHTS, "optimizer", "gradients")
"""In the order in which they stay resident. Gradients are last: they come back as zeros, without a copy."""

GENERATION_PARTS = (WEIGHTS, KV_CACHE)

KEEP_WEIGHTS = 1
"""The sleep level at which vLLM moves its weights to host memory, so that no refit is needed afterwards."""

MARGIN = 0.03
"""The share of a GPU that stays free when memory is kept resident: allocators fragment, and libraries allocate late."""

Measure = Callable[[str], AbstractContextManager[None]]
Exchange = Literal["auto", "always", "never"]
Held = tuple[tuple[str, ...], tuple[str, ...]]
"""The parts that train and generation workers hold."""


@dataclass(frozen=True)
class Residency:
    """What stays on the GPUs while the other role works: parts of the train state, and generation's memory as a whole."""

    train: tuple[str, ...] = ()
    generation: bool = False

    def held(self, roles: Sequence[str]) -> Held:
        """The parts that both sides hold while a phase of `roles` runs."""
        if self.generation:
            return TRAIN_PARTS, GENERATION_PARTS
        return {
            frozenset({"train"}): (TRAIN_PARTS, ()),
            frozenset({"train", "generation"}): (self.train or (WEIGHTS,), (WEIGHTS,)),
            frozenset({"generation"}): (self.train, GENERATION_PARTS),
        }[frozenset(roles)]

    def __str__(self) -> str:
        if self.generation:
            return "all of it stays on the GPUs"
        kept = " and ".join(self.train) or "nothing"
        return f"{kept} of the train state stays on the GPUs, generation sleeps during training"


NONE, ALL = Residency(), Residency(TRAIN_PARTS, generation=True)


@dataclass(frozen=True)
class MeasuredMemory:
    """Free bytes of one GPU after training phases and after generation, each without the other role's memory.

    `generation` is what generation gives up when it sleeps, `parts` what each part of the train state takes.
    """

    total: int
    parts: Mapping[str, int]
    generation: int
    free_in_training: int
    free_in_generation: int

    def residency(self) -> Residency:
        """What fits: everything, or as many parts of the train state as fit next to generation."""
        margin = int(MARGIN * self.total)
        if self.generation + margin <= self.free_in_training:
            return ALL
        kept, left = list[str](), self.free_in_generation - margin
        for part in TRAIN_PARTS:
            left -= self.parts[part]
            if left < 0:
                break
            kept.append(part)
        return Residency(tuple(kept))


class SharedDevices:
    """See the module's docstring. `measure(name)` counts the time of exchanges; `deadline` limits each call.

    The callbacks of `before_sleep` run while generation still has its memory, so that work in flight can end. Generation
    starts last: at first it holds all its parts, and the train state is on the host.
    """

    def __init__(
        self,
        train: WorkerGroup,
        generation: WorkerGroup,
        sleep_level: int,
        measure: Measure,
        deadline: Deadline,
        exchange: Exchange = "auto",
    ) -> None:
        self._train, self._generation = train, generation
        self._level, self._measure, self._deadline = sleep_level, measure, deadline
        self.before_sleep: list[Callable[[], None]] = []
        self._held: Held = ((), GENERATION_PARTS)
        self._settled = exchange != "auto"
        self._residency = ALL if exchange == "never" else NONE
        self._free: dict[Held, list[DeviceMemory]] = {}
        self._freed_by_sleep: list[int] = []

    def give_to(self, roles: Sequence[str], *, keep_generation_weights: bool = False) -> None:
        """Gives `roles` the parts that a phase of theirs needs.

        Pass `keep_generation_weights` if no refit follows: generation then continues with the weights it has.
        """
        wanted = self._residency.held(roles)
        if wanted == self._held:
            return
        if self._held[1] == (WEIGHTS,) and not wanted[1]:
            self.give_to(("generation",))  # vLLM falls asleep only from wide awake
        self._note()
        with self._measure("exchange"):
            dropped = not keep_generation_weights and "generation" not in roles
            self._release(wanted, self._level if dropped else KEEP_WEIGHTS)
            self._acquire(wanted)

    def settle(self) -> None:
        """Decides what stays resident from now on, after each phase has run once at its largest shape."""
        if self._settled:
            return
        self._note()
        self._settled = True
        training, generating = (self._free.get(NONE.held((role,)), []) for role in ("train", "generation"))
        if not training or not generating:  # no GPU: there is nothing to exchange
            self._residency = ALL
            return
        measured = MeasuredMemory(
            total=min(memory.total for memory in training),
            parts={part: max(memory.parts[part] for memory in training) for part in TRAIN_PARTS},
            generation=max(self._freed_by_sleep),
            free_in_training=min(memory.free for memory in training),
            free_in_generation=min(memory.free for memory in generating),
        )
        self._residency = measured.residency()
        logger.info("memory of colocated workers: %s (%s)", self._residency, measured)

    def _note(self) -> None:
        """Notes how much memory is free, until `settle`."""
        if self._settled or self._held not in (NONE.held(("train",)), NONE.held(("generation",))):
            return
        found = self._train.call("device_memory", deadline=self._deadline)
        self._free.setdefault(self._held, []).extend(memory for memory in found if memory is not None)

    def _release(self, wanted: Held, level: int) -> None:
        train, generation = self._held
        gone = tuple(part for part in train if part not in wanted[0])
        if gone or (wanted[1] and not generation):  # with no part, it frees what training has cached
            self._train.call("offload", gone, deadline=self._deadline)
            train = tuple(part for part in train if part in wanted[0])
        if set(generation) - set(wanted[1]):  # vLLM sleeps as a whole
            for ended in self.before_sleep:
                ended()
            freed = self._generation.call("sleep", level, deadline=self._deadline)
            logger.debug("generation sleeps at level %d; bytes freed by rank: %s", level, freed)
            self._freed_by_sleep = freed
            generation = ()
        self._held = (train, generation)

    def _acquire(self, wanted: Held) -> None:
        train, generation = self._held
        if missing := tuple(part for part in wanted[0] if part not in train):
            self._train.call("reload", missing, deadline=self._deadline)
        if missing := tuple(part for part in wanted[1] if part not in generation):
            self._generation.call("wake_up", missing, deadline=self._deadline)
        self._held = wanted
