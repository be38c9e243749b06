"""Dispatch compared with first in, first out, and the size of quanta against its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dagrl.rl.rollout.dispatch import FIRST_QUANTUM, LengthHistory, PendingRequest, QuantumSize, ShardLoad, dispatch


def simulate(lengths: list[int], expected: list[float], shards: int, slots: int) -> list[int]:
    """Returns the engine steps of each shard if every running request makes one token per step."""
    loads = [ShardLoad(slots) for _ in range(shards)]
    waiting = {number: PendingRequest(number, 0, value) for number, value in enumerate(expected)}
    left = dict(enumerate(lengths))
    done, step = [0] * shards, 0
    while left:
        for sent in dispatch(list(waiting.values()), loads):
            for item in sent:
                del waiting[item.request_id]
        step += 1
        for index, shard in enumerate(loads):
            for request in list(shard.requests):
                left[request] -= 1
                if not left[request]:
                    del left[request], shard.requests[request]
                    done[index] = step
    return done


def long_tailed(seed: int, prompts: int = 64, generations: int = 4) -> tuple[list[int], list[float]]:
    """Returns the lengths of a step's requests, and their expected lengths: the mean of 4 earlier ones of the prompt."""
    random = np.random.default_rng(seed)
    medians = 40 * np.exp(random.normal(size=prompts))
    drawn = np.clip(medians[:, None] * np.exp(0.5 * random.normal(size=(prompts, 2 * generations))), 1, 1000).astype(int)
    history = LengthHistory(default=1000)
    for prompt, lengths in enumerate(drawn[:, generations:].tolist()):
        for length in lengths:
            history.record(prompt, length)
    expected = [history.expected(prompt) for prompt in range(prompts) for _ in range(generations)]
    return drawn[:, :generations].reshape(-1).tolist(), expected


def test_longest_first_ends_sooner_and_more_evenly_than_fifo() -> None:
    gains, spreads, above = [], [], []
    for seed in range(10):
        lengths, expected = long_tailed(seed)
        ends = {True: simulate(lengths, expected, 4, 8), False: simulate(lengths, [1.0] * len(lengths), 4, 8)}
        gains.append(max(ends[False]) / max(ends[True]))
        spreads.append(np.ptp(ends[True]) / np.ptp(ends[False]))
        above.append(max(ends[True]) / max(max(lengths), sum(lengths) / (4 * 8)))
    assert np.mean(gains) > 1.2, gains
    assert np.mean(spreads) < 0.8, spreads
    assert np.mean(above) < 1.1, "against the least that any order needs"


@settings(deadline=None, max_examples=30)
@given(
    expected=st.lists(st.floats(1, 1000), max_size=40),
    shards=st.integers(1, 4),
    slots=st.integers(1, 8),
)
def test_every_slot_is_used_once(expected: list[float], shards: int, slots: int) -> None:
    loads = [ShardLoad(slots) for _ in range(shards)]
    waiting = [PendingRequest(number, 0, value) for number, value in enumerate(expected)]
    sent = dispatch(waiting, loads)
    ids = [item.request_id for shard in sent for item in shard]
    assert len(ids) == len(set(ids)) == min(len(expected), shards * slots)
    assert [set(load.requests) for load in loads] == [{item.request_id for item in shard} for shard in sent]
    if ids:
        kept_back = [item.expected for item in waiting if item.request_id not in ids]
        assert max(kept_back, default=0) <= min(expected[number] for number in ids)


def test_expected_lengths_fall_back_to_the_mean_and_the_default() -> None:
    history = LengthHistory(default=64)
    assert history.expected("a") == 64
    history.record("a", 10)
    history.record("a", 20)
    history.record("b", 60)
    assert [history.expected(key) for key in ("a", "b", "c")] == [15, 60, 30]


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
