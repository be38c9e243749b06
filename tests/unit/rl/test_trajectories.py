"""The trajectory buffer at any timing: ages are bounded, and every group is trained once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.rl.rollout.trajectories import TOO_OLD, FinishedGroup, TrajectoryBuffer


class Run:
    """Drives the buffer and keeps an independent account of every group."""

    def __init__(self, per_step: int, max_age: int) -> None:
        self.buffer: TrajectoryBuffer[str] = TrajectoryBuffer(per_step, max_age)
        self.max_age = max_age
        self.version = 0
        self.born: dict[int, int] = {}
        self.generating: list[int] = []
        self.trained: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()
        self.ages: list[int] = []
        self.batch: list[FinishedGroup[str]] | None = None

    def start(self) -> None:
        if self.buffer.room():
            number = self.buffer.start()
            self.born[number] = self.version
            self.generating.append(number)

    def finish(self, pick: int) -> None:
        if self.generating:
            number = self.generating.pop(pick % len(self.generating))
            self.buffer.finish(number, f"payload {number}")

    def drop(self, pick: int) -> None:
        if self.generating:
            self.buffer.drop(self.generating.pop(pick % len(self.generating)), "zero_variance")
            self.dropped["zero_variance"] += 1

    def take(self, pick: int = 0) -> None:
        if self.batch is None:
            self.batch = self.buffer.take()

    def learn(self, pick: int = 0) -> None:
        """Ends the step on the batch and advances the version."""
        if self.batch is not None:
            self.ages += [self.version - self.born[group.number] for group in self.batch]
            assert [group.version for group in self.batch] == [self.born[group.number] for group in self.batch]
            assert [group.payload for group in self.batch] == [f"payload {group.number}" for group in self.batch]
            self.trained.update(group.number for group in self.batch)
            self.batch = None
            self.version += 1
            assert self.buffer.advance(self.version) == [], "ages are kept by admission, not by throwing away"

    def check(self) -> None:
        counts = self.buffer.counts()
        kept = counts.generating + counts.finished + counts.taken + counts.trained
        assert counts.started == len(self.born) == kept + sum(counts.dropped.values())
        assert counts.dropped == self.dropped
        assert counts.trained == sum(self.trained.values())
        assert all(times == 1 for times in self.trained.values())
        assert all(age <= self.max_age for age in self.ages)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["start", "start", "finish", "finish", "drop", "take", "learn"]), st.integers(0, 1000)),
    max_size=300,
)


@settings(deadline=None, max_examples=300)
@given(per_step=st.integers(1, 4), max_age=st.integers(0, 4), actions=ACTIONS)
def test_any_timing_keeps_the_age_and_every_group(per_step: int, max_age: int, actions: list[tuple[str, int]]) -> None:
    run = Run(per_step, max_age)
    for action, pick in actions:
        run.start() if action == "start" else getattr(run, action)(pick)
        run.check()
    finish_everything(run)


def finish_everything(run: Run) -> None:
    """Finishes every group and trains batch after batch, from any state."""
    for _ in range(run.max_age + 3):
        while run.buffer.room():
            run.start()
        while run.generating:
            run.finish(0)
        before = run.version
        run.take()
        run.learn()
        assert run.version == before + 1, "the buffer never blocks for good"
        run.check()


def test_age_zero_is_the_synchronous_order() -> None:
    buffer: TrajectoryBuffer[int] = TrajectoryBuffer(groups_per_step=2, max_age_steps=0)
    trained = []
    for version in range(1, 4):
        started = [buffer.start() for _ in range(buffer.room())]
        for number in reversed(started):
            buffer.finish(number, number)
        batch = buffer.take()
        assert batch is not None and buffer.room() == 0, "nothing starts while training runs"
        trained.append([group.number for group in batch])
        buffer.advance(version)
    assert trained == [[0, 1], [2, 3], [4, 5]]


def test_a_slow_group_is_waited_for_in_its_last_step() -> None:
    """One group per step, ages up to 1. Group 0 is slow: group 1 may pass it once, then training waits."""
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=1)
    slow, quick = buffer.start(), buffer.start()
    assert buffer.room() == 0
    buffer.finish(quick, "quick")
    assert [group.number for group in buffer.take() or ()] == [quick]
    buffer.advance(1)
    later = buffer.start()
    buffer.finish(later, "later")
    assert buffer.take() is None, "taking group 2 now would leave group 0 for version 2, at age 2"
    buffer.finish(slow, "slow")
    assert [group.number for group in buffer.take() or ()] == [slow]


def test_a_skipped_version_drops_groups_that_are_too_old() -> None:
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=2, max_age_steps=1)
    finished, running = buffer.start(), buffer.start()
    buffer.finish(finished, "finished")
    assert buffer.advance(2) == [running]
    assert buffer.counts().dropped == {TOO_OLD: 2}
    assert buffer.room() == 4


def test_a_smaller_maximum_age_keeps_groups_that_can_still_be_trained() -> None:
    """A run of age 3 started 4 groups with version 0; its successor of age 1, at version 1, reaches one of them in time."""
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=1, version=1)
    buffer.next_number = 4
    for number in range(4):
        buffer.restart(number, version=0)
    buffer.finish(2, "finished")
    assert buffer.advance(1) == [0, 1, 3]
    assert buffer.counts().dropped == {TOO_OLD: 3}
    assert [group.number for group in buffer.take() or ()] == [2]


def test_restarted_groups_keep_their_number_and_their_age() -> None:
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=2, version=7)
    buffer.next_number = 12
    buffer.restart(10, version=6)
    buffer.restart(11, version=7)
    assert buffer.start() == 12
    for number in (12, 11, 10):
        buffer.finish(number, "")
    assert [(group.number, group.version) for group in buffer.take() or ()] == [(10, 6)]


def test_finished_groups_of_the_oldest_version_are_taken_first() -> None:
    """A resumed run may restart a group later than its number suggests. 11 is due now; taking 10 instead would block."""
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=1, version=7)
    buffer.next_number = 12
    for number, version in ((10, 7), (11, 6)):
        buffer.restart(number, version)
        buffer.finish(number, "")
    assert [group.number for group in buffer.take() or ()] == [11]


def test_finished_groups_of_one_version_are_taken_by_number() -> None:
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=2, max_age_steps=1, version=7)
    buffer.next_number = 13
    for number, version in ((12, 7), (10, 7), (11, 6)):
        buffer.restart(number, version)
        buffer.finish(number, "")
    assert [group.number for group in buffer.take() or ()] == [10, 11]


def test_finished_and_untrained_groups_are_listed_by_number() -> None:
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=2)
    for number in reversed([buffer.start() for _ in range(3)]):
        buffer.finish(number, "")
    assert [group.number for group in buffer.take() or ()] == [0]
    assert [group.number for group in buffer.finished()] == [1, 2]
    assert [group.number for group in buffer.untrained()] == [0, 1, 2], "the step on 0 is not done"


def test_the_latest_due_group_is_dropped_even_if_finished() -> None:
    """One group per step, ages up to 1, at version 1: of one group due now and two due next, training reaches two."""
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=1, version=1)
    buffer.next_number = 4
    for number, version in ((0, 1), (1, 1), (2, 0)):
        buffer.restart(number, version)
    for number in (0, 1):
        buffer.finish(number, "")
    assert buffer.advance(1) == [], "2 still generates, and is kept"
    assert buffer.untrained()[0].number == 0 and buffer.counts().dropped == {TOO_OLD: 1}
