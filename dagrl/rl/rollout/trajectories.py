"""The buffer between generation and training. It bounds how many policy versions old a group of trajectories becomes.

A group is one prompt with all its generations. It is started, generated, finished and trained on as a unit. Its age in a
training step is the version of the trained policy minus the version the group was started with, so no token in it is older.

    buffer = TrajectoryBuffer(groups_per_step=16, max_age_steps=1)
    number = buffer.start()                      # while buffer.room(): starts a group
    buffer.finish(number, payload)               # or buffer.drop(number, "zero_variance")
    groups = buffer.take()                       # a whole batch, or None if too few groups are finished
    buffer.advance(version)                      # after the step on it, when generation has the new weights

The buffer bounds ages by limiting what starts; it does not discard work. A step trains on `groups_per_step` groups. A group
that starts at version v, with a maximum age of A, must be among the next `groups_per_step * (A + 1)` groups trained, and
`room` admits no more. `take` returns the oldest finished groups, but only if every other group can still be trained in time.
It waits for a slow group whose last step has come. At A = 0 this is the synchronous order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class FinishedGroup(Generic[Payload]):
    """A finished group in a training batch. `version` is the version it was started with."""

    number: int
    version: int
    payload: Payload


class TrajectoryBuffer(Generic[Payload]):
    """See the module's docstring. Independent of tokens, rewards and Ray. Not thread-safe."""

    def __init__(self, groups_per_step: int, max_age_steps: int, *, version: int = 0) -> None:
        assert groups_per_step > 0 and max_age_steps >= 0
        self.groups_per_step = groups_per_step
        self.max_age_steps = max_age_steps
        self.version = version
        self.next_number = 0
        self._generating: dict[int, int] = {}  # number -> version it was started with
        self._finished: dict[int, FinishedGroup[Payload]] = {}
        self._taken: tuple[FinishedGroup[Payload], ...] = ()
        self.dropped: Counter[str] = Counter()  # in this process, by reason

    def room(self) -> int:
        """Returns how many groups may start now."""
        return max(0, self.groups_per_step * (self.max_age_steps + 1) - self.outstanding)

    def start(self, again: int | None = None) -> int:
        """Starts a group with the current version and returns its number: `next_number`, or `again` that of an earlier
        process, which a resumed run starts again. Such a run sets `next_number` first."""
        assert self.room() > 0, "start() without room(): the group could become too old"
        number = self.next_number if again is None else again
        self.next_number = max(self.next_number, number + 1)
        self._generating[number] = self.version
        return number

    def finish(self, number: int, payload: Payload) -> None:
        """Marks a group as generated and scored."""
        self._finished[number] = FinishedGroup(number, self._generating.pop(number), payload)

    def drop(self, number: int, reason: str) -> None:
        """Drops a group that is not taken yet, counts it under `reason`, and frees its room."""
        if self._generating.pop(number, None) is None:
            del self._finished[number]
        self.dropped[reason] += 1

    def take(self) -> list[FinishedGroup[Payload]] | None:
        """Returns the next batch by number; None if too few groups are finished, or if taking it would make others late."""
        assert not self._taken, "take() before advance(): the batch taken last is still being trained on"
        if len(self._finished) < self.groups_per_step:
            return None
        oldest = sorted(self._finished.values(), key=lambda group: (group.version, group.number))[: self.groups_per_step]
        if self._makes_others_late(oldest):
            return None
        for group in oldest:
            del self._finished[group.number]
        self._taken = tuple(sorted(oldest, key=lambda group: group.number))
        return list(self._taken)

    def advance(self, version: int) -> None:
        """Marks the last taken batch as trained. Groups that start from now on have `version`."""
        assert self.version <= version <= self.version + 1
        self._taken = ()
        self.version = version

    @property
    def outstanding(self) -> int:
        """Groups that are started and neither trained on nor dropped."""
        return len(self._generating) + len(self._finished) + len(self._taken)

    def finished(self) -> list[FinishedGroup[Payload]]:
        """Returns the finished groups that are not taken, by number."""
        return sorted(self._finished.values(), key=lambda group: group.number)

    def _started_at(self) -> dict[int, int]:
        return self._generating | {number: group.version for number, group in self._finished.items()}

    def _makes_others_late(self, batch: Sequence[FinishedGroup[Payload]]) -> bool:
        """Returns whether, after `batch`, more groups are due by some step than training takes until then."""
        numbers = {group.number for group in batch}
        others = [version for number, version in self._started_at().items() if number not in numbers]
        due = Counter(version + self.max_age_steps for version in others)
        waiting = 0
        for step in sorted(due):
            waiting += due[step]
            if waiting > self.groups_per_step * (step - self.version):
                return True
        return False
