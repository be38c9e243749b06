"""The buffer between generation and training: groups of trajectories, and how many policy versions old they may become.

A group is one prompt with all its generations; it is started, generated, finished and trained on as one. Its age in a
training step is the version of the policy that is trained less the version it was started with, so no token in it is older.

    buffer = TrajectoryBuffer(groups_per_step=16, max_age_steps=1)
    number = buffer.start()                      # while buffer.room(): a group may begin
    buffer.finish(number, payload)               # or buffer.drop(number, "zero_variance")
    groups = buffer.take()                       # a whole batch, or None: not enough is finished yet
    buffer.advance(version)                      # the step on it is done, and generation has the new weights

Ages are kept by never starting too much, not by throwing work away. Training takes `groups_per_step` groups a version, so a
group that starts at version v in a run whose maximal age is A must be among the next `groups_per_step * (A + 1)` trained:
`room` admits no more than that. `take` gives the oldest finished groups, and only if every other group can still be trained
in time; it waits for a slow group when its last step has come. At A = 0 this is the synchronous order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Payload = TypeVar("Payload")

TOO_OLD = "too_old"


@dataclass(frozen=True)
class Taken(Generic[Payload]):
    """A finished group on its way into a training step; `version` is the one it was started with."""

    number: int
    version: int
    payload: Payload


@dataclass(frozen=True)
class Counts:
    """What became of the groups that were started; `started` is the sum of all others. `dropped` is by reason."""

    started: int
    generating: int
    finished: int
    taken: int
    trained: int
    dropped: Mapping[str, int]


class TrajectoryBuffer(Generic[Payload]):
    """See the module's first lines. Knows nothing of tokens, rewards or Ray; not for use by several threads at once."""

    def __init__(self, groups_per_step: int, max_age_steps: int, *, version: int = 0) -> None:
        assert groups_per_step > 0 and max_age_steps >= 0
        self.groups_per_step = groups_per_step
        self.max_age_steps = max_age_steps
        self.version = version
        self.next_number = 0
        self._generating: dict[int, int] = {}  # number -> version it was started with
        self._finished: dict[int, Taken[Payload]] = {}
        self._taken: tuple[Taken[Payload], ...] = ()
        self._started = self._trained = 0
        self._dropped: Counter[str] = Counter()

    def room(self) -> int:
        """Groups that may start now."""
        outstanding = len(self._generating) + len(self._finished) + len(self._taken)
        return max(0, self.groups_per_step * (self.max_age_steps + 1) - outstanding)

    def start(self) -> int:
        """Begin a group with the current version; its number, which is `next_number`: a resumed run sets where to go on."""
        assert self.room() > 0, "start() without room(): the group could become too old"
        number, self.next_number = self.next_number, self.next_number + 1
        self._begin(number, self.version)
        return number

    def restart(self, number: int, version: int) -> None:
        """Take up a group of an earlier process under its number; `version` is the oldest that its tokens are from."""
        assert number < self.next_number and number not in self._generating and number not in self._finished
        self._begin(number, version)

    def finish(self, number: int, payload: Payload) -> None:
        """The group is generated and scored."""
        self._finished[number] = Taken(number, self._generating.pop(number), payload)

    def drop(self, number: int, reason: str) -> None:
        """Give up a group that was started and not taken; counted under `reason`. Its place is free again."""
        if number in self._generating:
            del self._generating[number]
        else:
            del self._finished[number]
        self._dropped[reason] += 1

    def take(self) -> list[Taken[Payload]] | None:
        """A batch for the next step by number, or None while it is not there, or while taking it would make others late."""
        assert not self._taken, "take() before advance(): the batch taken last is still being trained on"
        oldest = sorted(self._finished.values(), key=lambda group: (group.version, group.number))[: self.groups_per_step]
        if len(oldest) < self.groups_per_step or self._makes_others_late(oldest):
            return None
        for group in oldest:
            del self._finished[group.number]
        self._taken = tuple(sorted(oldest, key=lambda group: group.number))
        return list(self._taken)

    def advance(self, version: int) -> list[int]:
        """The batch taken last was trained on, and generation has `version`, by which later groups are counted.

        Groups that training cannot reach before they are too old are dropped; returns those that are still generating. That
        happens only after a version was skipped, or when a resumed run has a smaller `max_age_steps`.
        """
        assert version >= self.version
        self._trained += len(self._taken)
        self._taken = ()
        self.version = version
        too_old = self._beyond_reach()
        generating = [number for number in too_old if number in self._generating]
        for number in too_old:
            self.drop(number, TOO_OLD)
        return generating

    def counts(self) -> Counts:
        """What became of the groups started in this process."""
        return Counts(
            started=self._started,
            generating=len(self._generating),
            finished=len(self._finished),
            taken=len(self._taken),
            trained=self._trained,
            dropped=dict(self._dropped),
        )

    def generating(self) -> dict[int, int]:
        """Groups under way: number -> version it was started with."""
        return dict(self._generating)

    def next_batch(self) -> set[int]:
        """Groups certain to be in the next batch, unless they are dropped: those of the oldest that are finished, or due."""
        born = self._born()
        oldest = sorted(born, key=lambda number: (born[number], number))[: self.groups_per_step]
        due = self.version - self.max_age_steps
        return {number for number in oldest if number in self._finished or born[number] <= due}

    def finished(self) -> list[Taken[Payload]]:
        """Groups that are finished and not taken, by number."""
        return sorted(self._finished.values(), key=lambda group: group.number)

    def untrained(self) -> list[Taken[Payload]]:
        """Groups that are finished and not trained on, by number; those taken for a step that is not done are among them."""
        return sorted((*self._finished.values(), *self._taken), key=lambda group: group.number)

    def _begin(self, number: int, version: int) -> None:
        self._generating[number] = version
        self._started += 1

    def _born(self) -> dict[int, int]:
        return self._generating | {number: group.version for number, group in self._finished.items()}

    def _beyond_reach(self) -> list[int]:
        """Groups too many for the steps until they are due; the earliest due are kept, and finished ones before others."""
        born = self._born()
        kept, beyond = 0, []
        for number in sorted(born, key=lambda number: (born[number], number in self._generating, number)):
            steps = born[number] + self.max_age_steps - self.version + 1  # until then, the coming one included
            if kept < self.groups_per_step * steps:
                kept += 1
            else:
                beyond.append(number)
        return beyond

    def _makes_others_late(self, batch: Sequence[Taken[Payload]]) -> bool:
        """Whether, without `batch`, more groups would be due by some later step than training takes until then."""
        taken = {group.number for group in batch}
        due = Counter(born + self.max_age_steps for number, born in self._born().items() if number not in taken)
        waiting = 0
        for step in sorted(due):
            waiting += due[step]
            if waiting > self.groups_per_step * (step - self.version):
                return True
        return False
