"""The order of a refit's buckets: small cases against closed forms, and invariants of random ones."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, strategies as st

from dagrl.refit.plan.ordering import order_rounds, simulate
from dagrl.refit.plan.routes import RankPair


def time_of(
    durations: dict[RankPair, list[int]], after: dict[tuple[int, int, int], tuple[int, int, int]] | None = None
) -> float:
    ordered = order_rounds(durations, after)
    return simulate((number, sender, to, durations[sender, to][at]) for number, sender, to, at in ordered)


def test_simulated_durations() -> None:
    assert simulate([]) == 0
    assert simulate([(0, 0, 2, 3.0), (0, 1, 3, 5.0)]) == 5  # in parallel
    assert simulate([(0, 0, 2, 3.0), (1, 1, 2, 5.0)]) == 8  # one receiver
    assert simulate([(0, 0, 2, 3.0), (1, 2, 3, 5.0)]) == 8  # relayed
    assert simulate([(0, 0, 2, 3.0), (0, 2, 3, 1.0), (1, 5, 2, 1.0)]) == 4  # rank 2 waits for its round
    assert simulate([(0, 0, 2, 5.0), (1, 1, 3, 1.0)]) == 5  # the last to end is not the last to start
    assert (
        simulate([(0, 0, 2, 3.0), (1, 1, 3, 1.0), (2, 0, 3, 1.0)]) == 4
    )  # a rank without a bucket in a round stays as busy as before


@pytest.mark.parametrize(
    ("durations", "best"),
    [
        ({(0, 2): [4], (0, 3): [4], (1, 2): [4], (1, 3): [4]}, 8),  # two permutations
        ({(s, r): [1] for s in range(8) for r in range(8, 16)}, 8),  # a latin square
        ({(0, 1): [1, 9, 1], (2, 3): [11]}, 11),
        ({(0, 2): [9], (0, 3): [1], (1, 3): [9], (1, 2): [1]}, 10),  # slow messages together, fast ones together
        ({(0, 3): [8], (1, 3): [2], (1, 4): [4], (2, 4): [1, 8]}, 13),  # so a receiver receives the slowest first,
        ({(0, 4): [4], (1, 3): [2], (1, 4): [4], (2, 3): [4]}, 8),  # then from the sender with the most left,
        ({(0, 3): [2, 2], (1, 3): [2], (1, 4): [1], (2, 4): [4]}, 6),  # not the one with the most at first
        ({(0, 3): [1], (0, 5): [3], (1, 4): [3], (1, 5): [9]}, 12),  # receivers with the most left come first,
        ({(0, 3): [4, 4], (0, 4): [2], (1, 4): [4], (1, 5): [8]}, 12),  # not those with the most at first
        ({(0, 3): [5, 9], (3, 4): [2, 2]}, 14),  # rank 3 relays after it has received all of the first bucket
        ({(0, 3): [2], (0, 4): [2, 2], (1, 3): [3]}, 6),  # no rank starts while it is busy
    ],
)
def test_small_cases_are_optimal(durations: dict[RankPair, list[int]], best: int) -> None:
    assert time_of(durations) == best


def test_ranks_relay_while_others_still_receive_from_other_hosts() -> None:
    """Eight leaders get an eighth each over slow links and relay it to seven others, as fast as the links allow."""
    slow, fast, hosts = 90, 10, range(8, 16)
    durations = {(rank - 8, rank): [slow] * 4 for rank in hosts}
    durations |= {(leader, rank): [fast] * 4 for leader in hosts for rank in hosts if rank != leader}
    after = {
        (leader, rank, at): (leader - 8, leader, at)
        for leader in hosts
        for rank in hosts
        if rank != leader
        for at in range(4)
    }
    assert time_of(durations, after) == 4 * (slow + 7 * fast)


@given(st.data())
def test_invariants_of_random_rounds(data: st.DataObject) -> None:
    """One bucket each way, pairs in order, relays after arrival, and never twice as slow as the busiest rank."""
    senders, hosts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    leaders = range(senders, senders + hosts)
    length = st.lists(st.integers(1, 50), min_size=1, max_size=4)
    durations: dict[RankPair, list[int]] = {
        (sender, to): data.draw(length) for sender in range(senders) for to in leaders if data.draw(st.booleans())
    }
    relayed = data.draw(st.booleans())
    after = {}
    if relayed:
        for (sender, leader), buckets in list(durations.items()):
            to = leader + hosts  # its own follower
            first = len(durations.get((leader, to), []))
            durations[leader, to] = [*durations.get((leader, to), []), *(max(1, one // 9) for one in buckets)]
            after |= {(leader, to, first + at): (sender, leader, at) for at in range(len(buckets))}
    ordered = list(order_rounds(durations, after))
    assert Counter((s, r, at) for _, s, r, at in ordered) == Counter(
        (s, r, at) for (s, r), buckets in durations.items() for at in range(len(buckets))
    )
    assert (
        max(
            [*Counter((n, s) for n, s, _, _ in ordered).values(), *Counter((n, r) for n, _, r, _ in ordered).values()],
            default=1,
        )
        == 1
    )
    rounds = {(s, r, at): number for number, s, r, at in ordered}
    assert all(rounds[s, r, at] < rounds[s, r, at + 1] for s, r, at in rounds if (s, r, at + 1) in rounds)
    assert all(rounds[before] < rounds[bucket] for bucket, before in after.items())
    numbers = [entry[0] for entry in ordered]
    assert numbers == sorted(numbers) and set(numbers) == set(range(len(set(numbers))))
    loads: dict[int, int] = defaultdict(int)
    for (sender, to), buckets in durations.items():
        loads[sender] += sum(buckets)
        loads[to] += sum(buckets)
    if not relayed:  # while a bucket waits, one of its ranks is busy
        assert time_of(durations) <= max((loads[s] + loads[r] for s, r in durations), default=0)
