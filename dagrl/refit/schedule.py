"""Which replica sends each part, who passes it on, in which order buckets go: what decides a refit's speed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dagrl.refit.cover import Part

LEAST_SHARE = 1024

Pair = tuple[int, int]
"""(sender, receiver), as channel ranks"""


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Parts that the same sources hold and the same destinations want, chosen as one: large messages, and few choices.

    `lists` are the indices of the distinct destination descriptions that want it.
    """

    holders: tuple[int, ...]
    lists: tuple[int, ...]
    parts: tuple[Part, ...]
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """Where channel ranks are: the host of each, and whether a byte crosses between hosts once for each host."""

    hosts: tuple[int, ...]
    replicate_in_host: bool


@dataclass
class Routes:
    """Blocks that each pair carries, in order. `relays` go from a destination to others on its host, after it has them."""

    direct: dict[Pair, list[Block]] = field(default_factory=lambda: defaultdict(list))
    relays: dict[Pair, list[Block]] = field(default_factory=lambda: defaultdict(list))


def make_blocks(
    parts: Mapping[Part, tuple[int, ...]], nbytes: Mapping[Part, int], replicas: Mapping[tuple[int, ...], int], limit: int
) -> list[Block]:
    """Parts in blocks of at most `limit` bytes, and small enough that each holder may get several.

    `parts` has the destination lists that want each, `replicas` the destination ranks of some lists. Blocks are no smaller
    than a share of what a destination wants in all that does not matter for the balance.
    """
    wanted: dict[int, int] = defaultdict(int)
    for part, lists in parts.items():
        for number in lists:
            wanted[number] += nbytes[part]
    least = max(wanted.values(), default=0) // LEAST_SHARE
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Part]] = defaultdict(list)
    for part, lists in parts.items():
        groups[part.replicas.ranks, lists].append(part)
    blocks: list[Block] = []
    for (holders, lists), group in groups.items():
        choices = max(len(holders), replicas[lists])
        total = sum(nbytes[part] for part in group)
        most = min(limit, max(least, -(-total // (4 * choices)))) if choices > 1 else limit
        blocks.extend(
            Block(holders, lists, tuple(some), sum(nbytes[part] for part in some)) for some in _cut(group, nbytes, most)
        )
    return blocks


def _cut(parts: Sequence[Part], nbytes: Mapping[Part, int], limit: int) -> Iterator[list[Part]]:
    some: list[Part] = []
    filled = 0
    for part in parts:
        if 2 * nbytes[part] >= limit:  # by itself: it may need no staging
            yield [part]
            continue
        if some and filled + nbytes[part] > limit:
            yield some
            some, filled = [], 0
        some.append(part)
        filled += nbytes[part]
    if some:
        yield some


def choose_routes(
    blocks: Sequence[Block], ranks_of: Sequence[Sequence[int]], sources: int, limit: int, placement: Placement | None
) -> Routes:
    """One source for each block of each destination, so that sources send about equally many bytes.

    `ranks_of` has the channel ranks of each destination list. Blocks are given away largest first, to the source with the
    least to send so far, one on the destination's host if there is one. A source that does not yet send to the destination
    counts as having a little more, so that small blocks do not open new pairs.
    """
    chooser = _Chooser(blocks, ranks_of, sources, limit, placement)
    for block in sorted(blocks, key=lambda block: -block.nbytes):
        chooser.route(block)
    order = {id(block): index for index, block in enumerate(blocks)}
    for pairs in (chooser.routes.direct, chooser.routes.relays):
        for chosen in pairs.values():
            chosen.sort(key=lambda block: order[id(block)])
    return chooser.routes


class _Chooser:
    def __init__(
        self,
        blocks: Sequence[Block],
        ranks_of: Sequence[Sequence[int]],
        sources: int,
        limit: int,
        placement: Placement | None,
    ) -> None:
        self.routes = Routes()
        self._ranks_of, self._sources, self._placement = ranks_of, sources, placement
        wanted: dict[int, int] = defaultdict(int)
        for block in blocks:
            for rank in self._receivers(block):
                wanted[rank] += block.nbytes
        self._new_pair = {rank: min(limit // 4, count // 64) for rank, count in wanted.items()}
        self._load: dict[int, int] = defaultdict(int)  # bytes a source sends, or a destination receives from other hosts
        self._near: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def _receivers(self, block: Block) -> list[int]:
        return [rank for index in block.lists for rank in self._ranks_of[index]]

    def route(self, block: Block) -> None:
        """Give every destination of `block` a sender."""
        receivers = self._receivers(block)
        if self._placement is None or not self._placement.replicate_in_host:
            for rank in receivers:
                self._send(block, rank)
            return
        hosts: dict[int, list[int]] = defaultdict(list)
        for rank in receivers:
            hosts[self._placement.hosts[rank]].append(rank)
        for host, ranks in hosts.items():
            if self._holders_on(block.holders, host):
                for rank in ranks:
                    self._send(block, rank)
            else:
                self._send_once(block, ranks)

    def _send_once(self, block: Block, ranks: Sequence[int]) -> None:
        """One of `ranks`, the one that hears least from other hosts so far, gets the block and passes it on."""
        leader = min(ranks, key=lambda rank: (self._load[rank], rank))
        self._load[leader] += block.nbytes
        self._send(block, leader)
        for rank in ranks:
            if rank != leader:
                self.routes.relays[leader, rank].append(block)

    def _send(self, block: Block, to: int) -> None:
        holders = block.holders
        if self._placement is not None and len(holders) > 1:
            holders = self._holders_on(holders, self._placement.hosts[to]) or holders
        source = holders[0]
        if len(holders) > 1:
            load, direct, new_pair, count = self._load, self.routes.direct, self._new_pair[to], self._sources

            def cost(source: int) -> tuple[int, int]:
                return load[source] + (0 if (source, to) in direct else new_pair), (source - to) % count

            source = min(holders, key=cost)
        self._load[source] += block.nbytes
        self.routes.direct[source, to].append(block)

    def _holders_on(self, holders: tuple[int, ...], host: int) -> tuple[int, ...]:
        assert self._placement is not None
        found = self._near.get((holders, host))
        if found is None:
            found = tuple(rank for rank in holders if self._placement.hosts[rank] == host)
            self._near[holders, host] = found
        return found


Position = tuple[int, int, int]
"""(sender, receiver, position among the buckets of the pair)"""


def order_rounds(
    sizes: Mapping[Pair, Sequence[int]], after: Mapping[Position, Position] | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Buckets in rounds, as (round, sender, receiver, position within the pair).

    `sizes` has the bytes of each pair's buckets. In a round every rank sends at most one bucket and receives at most one;
    those with the most left come first, so that the busiest link is never idle while it could work. A bucket in `after`
    waits for a round later than that of the bucket it is given.
    """
    after = after or {}
    waiting: dict[int, dict[int, int]] = defaultdict(dict)  # receiver -> sender -> next position
    to_send: dict[int, int] = defaultdict(int)
    to_receive: dict[int, int] = defaultdict(int)
    for (sender, receiver), buckets in sizes.items():
        waiting[receiver][sender] = 0
        to_send[sender] += sum(buckets)
        to_receive[receiver] += sum(buckets)
    done: dict[Position, int] = {}
    number = 0
    while waiting:
        busy: set[int] = set()
        for receiver in sorted(waiting, key=lambda rank: (-to_receive[rank], rank)):
            best, most = -1, (-1, 0)
            for sender, position in waiting[receiver].items():
                rank = (to_send[sender], -sender)
                if rank > most and sender not in busy and _ready(after, done, (sender, receiver, position), number):
                    best, most = sender, rank
            if best < 0:
                continue
            busy.add(best)
            position = waiting[receiver][best]
            nbytes = sizes[best, receiver][position]
            to_send[best] -= nbytes
            to_receive[receiver] -= nbytes
            done[best, receiver, position] = number
            _advance(waiting, receiver, best, len(sizes[best, receiver]))
            yield number, best, receiver, position
        number += 1


def _ready(after: Mapping[Position, Position], done: Mapping[Position, int], bucket: Position, number: int) -> bool:
    before = after.get(bucket)
    return before is None or done.get(before, number) < number


def _advance(waiting: dict[int, dict[int, int]], receiver: int, sender: int, buckets: int) -> None:
    waiting[receiver][sender] += 1
    if waiting[receiver][sender] == buckets:
        del waiting[receiver][sender]
        if not waiting[receiver]:
            del waiting[receiver]
