"""Dispatch of requests to shards, and the size of quanta against its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dagrl.rl.rollout.rollouts import FIRST_QUANTUM, QuantumSize, ShardLoad, dispatch


@settings(deadline=None, max_examples=30)
@given(
    cohorts=st.lists(st.integers(0, 3), max_size=40),
    shards=st.integers(1, 4),
    slots=st.integers(1, 8),
)
def test_requests_of_lower_cohorts_go_first_and_evenly(cohorts: list[int], shards: int, slots: int) -> None:
    loads = [ShardLoad(slots) for _ in range(shards)]
    sent = dispatch(dict(enumerate(cohorts)), loads)
    ids = [request for shard in sent for request in shard]
    assert len(ids) == len(set(ids)) == min(len(cohorts), shards * slots)
    assert [load.requests for load in loads] == [set(shard) for shard in sent]
    assert max(map(len, sent)) - min(map(len, sent)) <= 1
    order = sorted(range(len(cohorts)), key=lambda request: (cohorts[request], request))
    assert sorted(ids) == sorted(order[: len(ids)])


def test_the_shard_with_the_most_free_slots_is_filled_first() -> None:
    loads = [ShardLoad(4, {7, 8, 9}), ShardLoad(0), ShardLoad(4, {6})]
    assert dispatch(dict.fromkeys(range(6), 0), loads) == [[2], [], [0, 1, 3]]


@pytest.mark.parametrize(
    ("seconds", "in_flight", "step_s", "overhead_s", "expected"),
    [
        (1.0, 1, 0.01, 0.000905, 12),  # 0.905 ms is 0.75 % of 120 ms, twelve steps of 10 ms and itself
        (1.0, 1, 0.01, 0.00091, 13),
        (1.0, 1, 0.01, 0.0002, 6),  # and 60 ms are the least
        (1.0, 2, 0.01, 0.002, 27),
        (0.1, 1, 0.01, 0.002, 10),  # the bound on time wins
        (0.1, 2, 0.01, 0.002, 5),  # and is one of all quanta in flight together
        (0.001, 1, 0.01, 0.002, 1),  # but one step there must be
    ],
)
def test_quantum_size(seconds: float, in_flight: int, step_s: float, overhead_s: float, expected: int) -> None:
    size, fixed = QuantumSize(None, seconds, in_flight), QuantumSize(7, seconds, in_flight)
    assert size.next() == (FIRST_QUANTUM,)
    for one in (size, fixed):
        for _ in range(100):
            one.record([8], [8 * step_s], overhead_s)
    assert size.next() == (expected,) and fixed.next() == (7,)
    if expected > 1:
        assert in_flight * expected * step_s <= seconds + 1e-9


@pytest.mark.parametrize("mean_s", [0.0005, 0.001, 0.0018])
def test_costly_quanta_are_longer_and_overhead_stays_under_its_share(mean_s: float) -> None:
    """With long-tailed overheads, and every tenth quantum ending early, within 0.5 s."""
    random, size = np.random.default_rng(0), QuantumSize(None, seconds=0.5)
    busy = spent = 0.0
    for number in range(4000):
        (steps,) = size.next()
        completed = 3 if number % 10 == 9 else steps
        overhead = mean_s * float(np.exp(random.normal() - 0.5))
        size.record([completed if completed == steps else 0], [completed * 0.001], overhead)
        if number >= 100:
            busy, spent = busy + completed * 0.001, spent + overhead
    assert 0.005 < spent / (busy + spent) < 0.01


def test_slower_steps_make_quanta_of_fewer_steps() -> None:
    """The clock ends each such quantum with the steps made so far."""
    size = QuantumSize(None, seconds=1.0)
    size.record([100], [0.1], 0.0005)
    assert size.next() == (67,), "of 1 ms"
    for _ in range(60):
        completed = min(*size.next(), 10)  # of 100 ms, within the second
        size.record([completed], [completed * 0.1], 0.0005)
    assert size.next() == (1,)
    assert (size.most_s, QuantumSize(5, seconds=1.0).most_s) == (1.0, None)


def test_quanta_of_unequal_shards_take_the_same_time() -> None:
    """Steps take 10, 7 and 5 ms. The fourth shard has not started and counts as the slowest."""
    taken = [0.01, 0.007, 0.005]
    size = QuantumSize(None, seconds=1.0, in_flight=2, shards=4)
    seconds = np.zeros(3)
    for _ in range(100):
        steps = size.next()
        seconds += np.multiply(steps[:3], taken)
        size.record([*steps[:3], 0], [*np.multiply(steps[:3], taken), 0.0], 0.0002)
    assert steps[0] == steps[3] == 6 and steps[2] == 12, "60 ms each"
    assert seconds[1:] == pytest.approx(seconds[0], rel=0.02), "also where a step is no whole part of a quantum"
    assert max(size.left_s.values()) <= max(taken), "what is left of a quantum is less than a step"


def test_no_quantum_is_longer_than_the_bound() -> None:
    """Two in flight within 0.5 s: time left over by one quantum does not extend the next beyond 0.25 s."""
    size = QuantumSize(None, seconds=0.5, in_flight=2, shards=2)
    for _ in range(20):
        assert size.next() == (1, 1) or size.step_s == {}
        size.record([1, 1], [0.25, 0.2], 0.001)


@pytest.mark.parametrize(("seconds", "steps"), [(0.25, (2, 10)), (0.05, (1, 2))])
def test_the_bound_limits_all_shards_to_the_time_of_the_slowest(seconds: float, steps: tuple[int, int]) -> None:
    """Steps of 100 and 20 ms: both get 200 of 250 ms. A single step of 100 ms may exceed the bound."""
    size = QuantumSize(None, seconds=2 * seconds, in_flight=2, shards=2)
    size.record([1, 1], [0.1, 0.02], 0.01)
    assert size.next() == steps


def test_a_shard_that_ended_early_does_not_count_as_slow() -> None:
    size = QuantumSize(None, seconds=1.0, in_flight=1, shards=2)
    size.record([10, 10], [0.1, 0.1], 0.0002)
    for _ in range(50):
        size.record([10, 0], [0.1, 0.03], 0.0002)
    assert size.next() == (6, 6)
    for _ in range(50):
        size.record([10, 10], [0.0, 0.1], 0.0002)
    assert size.next() == (6, 6), "a time of zero says nothing"
    size.record([0, 0], [0.1, 0.1], 5.0)
    assert size.next() == (6, 6), "nor does what it cost to start one without steps"
