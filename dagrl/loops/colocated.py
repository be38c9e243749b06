"""Train and generation workers that share their GPUs: who has the memory when (`policy.generation.colocated.enabled`).

    shared.give_to(("train",))                # before a training phase: generation sleeps, the train state comes back
    shared.give_to(("train", "generation"))   # before a refit: both hold weights, and nothing else
    shared.give_to(("generation",))           # before a quantum: the train state goes to the host, the KV cache comes back

`Session` calls this before each replay with the roles of its phase, so a loop need not know of it. What a role gives up
is given up before the other takes anything. Workers need `offload(parts)` and `reload(parts)` on the train side, and
`sleep(level)` and `wake_up(tags)` on the generation side. Where vLLM cannot sleep (without a GPU) it keeps its memory, and
all else is alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from dagrl.deadline import Deadline
from dagrl.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TRAIN_PARTS = (WEIGHTS, "gradients", "optimizer")
GENERATION_PARTS = (WEIGHTS, KV_CACHE)
HELD: dict[frozenset[str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    frozenset({"train"}): (TRAIN_PARTS, ()),
    frozenset({"train", "generation"}): ((WEIGHTS,), (WEIGHTS,)),
    frozenset({"generation"}): ((), GENERATION_PARTS),
}
"""What train and generation workers hold while a phase of these roles runs."""

KEEP_WEIGHTS = 1
"""The sleep level at which vLLM's weights go to host memory; no refit is needed afterwards."""

Measure = Callable[[str], AbstractContextManager[None]]


class SharedDevices:
    """See the module's first lines. `measure(name)` counts the time that exchanges take; `deadline` is of each call.

    `before_sleep` are called while generation still has its memory: what is in flight there must end first.
    At first generation holds all it has, and the train state is on the host: generation was started last.
    """

    def __init__(
        self, train: WorkerGroup, generation: WorkerGroup, sleep_level: int, measure: Measure, deadline: Deadline
    ) -> None:
        self._train, self._generation = train, generation
        self._level, self._measure, self._deadline = sleep_level, measure, deadline
        self.before_sleep: list[Callable[[], None]] = []
        self._held: tuple[tuple[str, ...], tuple[str, ...]] = ((), GENERATION_PARTS)

    def give_to(self, roles: Sequence[str], *, keep_generation_weights: bool = False) -> None:
        """Make a phase of `roles` possible.

        `keep_generation_weights` is for training turns that no refit follows: generation goes on with the weights it has.
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
