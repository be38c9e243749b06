"""Which replica sends each part, and who passes it on: half of what decides a refit's speed (`order.py` is the other)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagrl.refit.cover import Part

if TYPE_CHECKING:
    from dagrl.config import RefitConfig

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
class LinkSpeeds:
    """Bytes per second and direction of one rank, by default an H200's datasheet: NVLink in a host, NDR between hosts."""

    in_host: float = 450e9
    between_hosts: float = 50e9

    @classmethod
    def of_config(cls, refit: RefitConfig) -> LinkSpeeds:
        """As a configuration has them, in GB/s."""
        return cls(refit.in_host_gb_per_s * 1e9, refit.between_hosts_gb_per_s * 1e9)

    def seconds(self, nbytes: int, crosses: bool) -> float:
        """How long a message travels; `crosses`: from one host to another."""
        return nbytes / (self.between_hosts if crosses else self.in_host)


@dataclass(frozen=True)
class Placement:
    """Where channel ranks are: the host of each, and whether a byte crosses between hosts once for each host."""

    hosts: tuple[int, ...]
    replicate_in_host: bool

    def crosses(self, sender: int, receiver: int) -> bool:
        """Whether what goes between two ranks leaves a host."""
        return self.hosts[sender] != self.hosts[receiver]


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
