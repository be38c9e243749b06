"""The trajectory buffer at chosen timings; `tests/unit/run/test_state_machines.py` has random ones."""

from __future__ import annotations

from dagrl.rl.rollout.experience import TrajectoryBuffer


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


def test_finished_groups_are_listed_by_number() -> None:
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=2)
    for number in reversed([buffer.start() for _ in range(3)]):
        buffer.finish(number, "")
    assert [group.number for group in buffer.take() or ()] == [0]
    assert [group.number for group in buffer.finished()] == [1, 2]
