"""The order of a plan's messages: each starts as soon as both its ranks are free, by a simulation at the links' speeds.

A rank takes part in one group of messages at a time, of at most one each way, and begins the next when all of the group have
ended. This is how channels run rounds, so the simulation says how long a plan takes where links keep their speed and
packing hides behind messages.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dagrl.refit.schedule import Pair

Position = tuple[int, int, int]
"""(sender, receiver, position among the buckets of the pair)"""
Ordered = tuple[int, int, int, int]
"""(round, sender, receiver, position within the pair)"""


def order_rounds(
    durations: Mapping[Pair, Sequence[int]], after: Mapping[Position, Position] | None = None
) -> Iterator[Ordered]:
    """Buckets in rounds, by list scheduling.

    `durations` has how long each of a pair's buckets travels, in any whole unit. In a round every rank sends at most one
    bucket and receives at most one. Whenever ranks become free, those with the most left come first, and of what a receiver
    could hear the slowest link: a network that idles is not made up for. `after` has the bucket that a bucket passes on:
    its sender must have received that first.
    """
    waiting = _Waiting(durations, after or {})
    free: dict[int, int] = defaultdict(int)  # rank -> when its group ends
    freed = {rank for pair in durations for rank in pair}
    idle = set(freed)
    ends: list[tuple[int, int]] = []  # (time, rank)
    number = now = 0
    while waiting:
        chosen = waiting.choose(idle, freed)
        for sender, receiver, position in chosen:
            end = now + durations[sender, receiver][position]
            for rank in (sender, receiver):
                free[rank] = max(free[rank], end)
                heapq.heappush(ends, (end, rank))
            idle -= {sender, receiver}
            waiting.start(sender, receiver)
            yield number, sender, receiver, position
        number += bool(chosen)
        assert ends or not waiting, "buckets wait for each other"
        now, freed = ends[0][0] if ends else now, set()
        while ends and ends[0][0] == now:
            freed.add(heapq.heappop(ends)[1])
        idle |= {rank for rank in freed if free[rank] <= now}


class _Waiting:
    """Buckets that have not started; those of a pair go in order."""

    def __init__(self, durations: Mapping[Pair, Sequence[int]], after: Mapping[Position, Position]) -> None:
        self._durations, self._after = durations, after
        self._next: dict[int, dict[int, int]] = defaultdict(dict)  # receiver -> sender -> position
        self._receivers: dict[int, set[int]] = defaultdict(set)  # of each sender
        self._to_send: dict[int, int] = defaultdict(int)
        self._to_receive: dict[int, int] = defaultdict(int)
        for (sender, receiver), buckets in durations.items():
            self._next[receiver][sender] = 0
            self._receivers[sender].add(receiver)
            self._to_send[sender] += sum(buckets)
            self._to_receive[receiver] += sum(buckets)

    def __bool__(self) -> bool:
        return bool(self._next)

    def choose(self, idle: set[int], freed: set[int]) -> list[Position]:
        """What starts now: at most one bucket of each idle sender, to each idle receiver.

        Only what has a part in `freed`, the ranks whose group has just ended, could not have started before.
        """
        reached = freed & self._next.keys()
        for sender in freed & self._receivers.keys():
            reached |= self._receivers[sender]
        chosen: list[Position] = []
        busy: set[int] = set()
        for receiver in sorted(reached & idle, key=lambda rank: (-self._to_receive[rank], rank)):
            waiting = self._next[receiver]
            best, most = -1, (0, 0, 0)
            for sender in waiting.keys() & (idle if receiver in freed else freed & idle):
                if sender in busy:
                    continue
                rank = (self._durations[sender, receiver][waiting[sender]], self._to_send[sender], -sender)
                if (best < 0 or rank > most) and self._is_ready((sender, receiver, waiting[sender])):
                    best, most = sender, rank
            if best >= 0:
                busy.add(best)
                chosen.append((best, receiver, waiting[best]))
        return chosen

    def _is_ready(self, bucket: Position) -> bool:
        """Whether what it passes on has begun to come: its sender is idle once that has ended."""
        if bucket not in self._after:
            return True
        source, sender, position = self._after[bucket]
        return self._next.get(sender, {}).get(source, position + 1) > position

    def start(self, sender: int, receiver: int) -> None:
        """The pair's next bucket is on its way."""
        buckets, position = self._durations[sender, receiver], self._next[receiver][sender]
        self._to_send[sender] -= buckets[position]
        self._to_receive[receiver] -= buckets[position]
        self._next[receiver][sender] += 1
        if position + 1 == len(buckets):
            del self._next[receiver][sender]
            self._receivers[sender].discard(receiver)
            if not self._next[receiver]:
                del self._next[receiver]


def simulate(messages: Iterable[tuple[int, int, int, float]]) -> float:
    """When the last of `messages` ends, `(round, sender, receiver, seconds)` in the order of rounds."""
    free: dict[int, float] = defaultdict(float)
    ends: dict[int, float] = {}  # of the ranks of the current round
    current = -1
    for number, sender, receiver, seconds in messages:
        if number != current:
            free.update(ends)
            current, ends = number, {}
        end = max(free[sender], free[receiver]) + seconds
        for rank in (sender, receiver):
            ends[rank] = max(ends.get(rank, 0.0), end)
    return max([*free.values(), *ends.values()], default=0.0)
