"""The trajectory buffer at chosen timings; `tests/unit/run/test_state_machines.py` has random ones."""

from __future__ import annotations

from dagrl.rl.rollout.trajectories import TOO_OLD, TrajectoryBuffer


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
    assert buffer.dropped == {TOO_OLD: 2}
    assert buffer.room() == 4


def test_a_smaller_maximum_age_keeps_groups_that_can_still_be_trained() -> None:
    """A run of age 3 started 4 groups; its successor of age 1 reaches two of them in time."""
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=1, version=1)
    buffer.next_number = 4
    for number in range(4):
        buffer.restart(number)
    buffer.finish(2, "finished")
    assert buffer.advance(1) == [1, 3]
    assert buffer.dropped == {TOO_OLD: 2}
    assert [group.number for group in buffer.take() or ()] == [2]


def test_finished_groups_are_listed_by_number() -> None:
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=2)
    for number in reversed([buffer.start() for _ in range(3)]):
        buffer.finish(number, "")
    assert [group.number for group in buffer.take() or ()] == [0]
    assert [group.number for group in buffer.finished()] == [1, 2]
