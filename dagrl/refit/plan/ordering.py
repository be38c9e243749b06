"""Orders a plan's buckets in rounds by simulating them at the links' speeds: each starts as soon as both ranks are free.

In a round a rank sends at most one bucket and receives at most one; it starts the next round when both have ended. Channels
run rounds in the same way, so the simulation predicts the duration of a refit whose links keep their speed and whose packing
overlaps with messages.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dagrl.refit.plan.routes import RankPair

BucketPosition = tuple[int, int, int]  # (sender, receiver, position among the buckets of the pair)
OrderedBucket = tuple[int, int, int, int]  # (round, sender, receiver, position within the pair)

IN_HOST, BETWEEN_HOSTS = 450e9, 50e9
"""Bytes per second of one rank, per direction: an H200's NVLink in a host and NDR between hosts."""


def message_s(nbytes: int, crosses: bool) -> float:
    """Returns the seconds that a message takes; `crosses`: from one host to another."""
    return nbytes / (BETWEEN_HOSTS if crosses else IN_HOST)


def order_rounds(
    durations: Mapping[RankPair, Sequence[int]], after: Mapping[BucketPosition, BucketPosition] | None = None
) -> Iterator[OrderedBucket]:
    """Yields buckets in rounds, by list scheduling.

    `durations` has the duration of each bucket of a pair, in any integer unit. In a round each rank sends at most one bucket
    and receives at most one. When ranks become free, those with the most work left start first, and a receiver starts its
    slowest link first: idle time on a network between hosts cannot be made up later. `after` has the bucket that a bucket
    relays, which its sender must have received first.
    """
    unstarted = _Unstarted(durations, after or {})
    free: dict[int, int] = defaultdict(int)  # rank -> when its round ends
    freed = {rank for pair in durations for rank in pair}
    idle = set(freed)
    ends: list[tuple[int, int]] = []  # (time, rank)
    number = now = 0
    while unstarted:
        chosen = unstarted.choose(idle, freed)
        for sender, receiver, position in chosen:
            end = now + durations[sender, receiver][position]
            for rank in (sender, receiver):
                free[rank] = max(free[rank], end)
                heapq.heappush(ends, (end, rank))
            idle -= {sender, receiver}
            unstarted.start(sender, receiver)
            yield number, sender, receiver, position
        number += bool(chosen)
        assert ends or not unstarted, "buckets wait for each other"
        now, freed = ends[0][0] if ends else now, set()
        while ends and ends[0][0] == now:
            freed.add(heapq.heappop(ends)[1])
        idle |= {rank for rank in freed if free[rank] <= now}


class _Unstarted:
    """Buckets that have not started. Those of a pair start in order."""

    def __init__(self, durations: Mapping[RankPair, Sequence[int]], after: Mapping[BucketPosition, BucketPosition]) -> None:
        self._durations, self._after = durations, after
        self._next: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)  # receiver -> sender -> duration, position
        self._receivers: dict[int, set[int]] = defaultdict(set)  # of each sender
        self._to_send: dict[int, int] = defaultdict(int)
        self._to_receive: dict[int, int] = defaultdict(int)
        for (sender, receiver), buckets in durations.items():
            self._next[receiver][sender] = buckets[0], 0
            self._receivers[sender].add(receiver)
            self._to_send[sender] += sum(buckets)
            self._to_receive[receiver] += sum(buckets)

    def __bool__(self) -> bool:
        return bool(self._next)

    def choose(self, idle: set[int], freed: set[int]) -> list[BucketPosition]:
        """Returns the buckets that start now: at most one per idle sender and idle receiver.

        Considers only buckets of `freed`, the ranks whose round has just ended; no other could start.
        """
        ready = freed & idle
        reached = ready & self._next.keys()
        senders, fresh = idle & self._receivers.keys(), ready & self._receivers.keys()  # that have no receiver yet
        for sender in fresh:
            reached |= self._receivers[sender] & idle
        chosen: list[BucketPosition] = []
        for receiver in sorted(reached, key=lambda rank: (-self._to_receive[rank], rank)):
            waiting = self._next[receiver]
            best, most = -1, (0, 0, 0)
            for sender in waiting.keys() & (senders if receiver in freed else fresh):
                duration, position = waiting[sender]
                if duration < most[0]:
                    continue
                rank = (duration, self._to_send[sender], -sender)
                if (best < 0 or rank > most) and self._is_ready((sender, receiver, position)):
                    best, most = sender, rank
            if best >= 0:
                senders.discard(best)
                fresh.discard(best)
                chosen.append((best, receiver, waiting[best][1]))
        return chosen

    def _is_ready(self, bucket: BucketPosition) -> bool:
        """Returns whether the bucket that this one relays has started: once it ends, the sender is idle."""
        if bucket not in self._after:
            return True
        source, sender, position = self._after[bucket]
        waiting = self._next.get(sender, {}).get(source)
        return waiting is None or waiting[1] > position

    def start(self, sender: int, receiver: int) -> None:
        """Marks the pair's next bucket as started."""
        buckets, (duration, position) = self._durations[sender, receiver], self._next[receiver][sender]
        self._to_send[sender] -= duration
        self._to_receive[receiver] -= duration
        if position + 1 < len(buckets):
            self._next[receiver][sender] = buckets[position + 1], position + 1
        else:
            del self._next[receiver][sender]
            self._receivers[sender].discard(receiver)
            if not self._next[receiver]:
                del self._next[receiver]


def simulate(messages: Iterable[tuple[int, int, int, float]]) -> float:
    """Returns when the last of `messages` ends: `(round, sender, receiver, seconds)` each, in the order of rounds."""
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
