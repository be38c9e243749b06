"""Exchanges GPU memory between train and generation workers that share GPUs (`policy.generation.colocated.enabled`).

    shared.give_to(("train",))                # before a training phase: generation sleeps, the train state comes back
    shared.give_to(("train", "generation"))   # before a refit: both hold weights, and nothing else
    shared.give_to(("generation",))           # before a quantum: the train state goes to the host, the KV cache comes back

`Replays` calls this before each replay with the roles of its phase, so loops do not. One role releases its memory before the
other acquires any. Train workers need `offload(parts)` and `reload(parts)`, generation workers `sleep(level)` and
`wake_up(tags)`. Without a GPU vLLM cannot sleep and keeps its memory; everything else is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from dagrl.runtime.deadline import Deadline
from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TRAIN_PARTS = (WEIGHTS, "gradients", "optimizer")
GENERATION_PARTS = (WEIGHTS, KV_CACHE)
HELD: dict[frozenset[str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    frozenset({"train"}): (TRAIN_PARTS, ()),
    frozenset({"train", "generation"}): ((WEIGHTS,), (WEIGHTS,)),
    frozenset({"generation"}): ((), GENERATION_PARTS),
}
"""The parts that train and generation workers hold while a phase of these roles runs."""

KEEP_WEIGHTS = 1
"""The sleep level at which vLLM moves its weights to host memory, so that no refit is needed afterwards."""

Measure = Callable[[str], AbstractContextManager[None]]


class SharedDevices:
    """See the module's docstring. `measure(name)` counts the time of exchanges; `deadline` limits each call.

    The callbacks of `before_sleep` run while generation still has its memory, so that work in flight can end. Generation
    starts last: at first it holds all its parts, and the train state is on the host.
    """

    def __init__(
        self, train: WorkerGroup, generation: WorkerGroup, sleep_level: int, measure: Measure, deadline: Deadline
    ) -> None:
        self._train, self._generation = train, generation
        self._level, self._measure, self._deadline = sleep_level, measure, deadline
        self.before_sleep: list[Callable[[], None]] = []
        self._held: tuple[tuple[str, ...], tuple[str, ...]] = ((), GENERATION_PARTS)

    def give_to(self, roles: Sequence[str], *, keep_generation_weights: bool = False) -> None:
        """Gives `roles` the parts that a phase of theirs needs.

        Pass `keep_generation_weights` if no refit follows: generation then continues with the weights it has.
        """
        wanted = HELD[frozenset(roles)]
        if wanted == self._held:
            return
        if self._held[1] and KV_CACHE not in self._held[1] and not wanted[1]:
            self.give_to(("generation",))  # vLLM falls asleep only from wide awake
        with self._measure("exchange"):
            self._release(wanted, KEEP_WEIGHTS if keep_generation_weights or wanted[0] != TRAIN_PARTS else self._level)
            self._acquire(wanted)

    def _release(self, wanted: tuple[tuple[str, ...], tuple[str, ...]], level: int) -> None:
        train, generation = self._held
        if gone := tuple(part for part in train if part not in wanted[0]):
            self._train.call("offload", gone, deadline=self._deadline)
            train = tuple(part for part in train if part in wanted[0])
        if set(generation) - set(wanted[1]):  # vLLM sleeps as a whole
            for ended in self.before_sleep:
                ended()
            freed = self._generation.call("sleep", level, deadline=self._deadline)
            logger.debug("generation sleeps at level %d; bytes freed by rank: %s", level, freed)
            generation = ()
        self._held = (train, generation)

    def _acquire(self, wanted: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        train, generation = self._held
        if missing := tuple(part for part in wanted[0] if part not in train):
            self._train.call("reload", missing, deadline=self._deadline)
        if missing := tuple(part for part in wanted[1] if part not in generation):
            self._generation.call("wake_up", missing, deadline=self._deadline)
        self._held = wanted
