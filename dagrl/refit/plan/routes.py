"""Chooses which replica sends each part, and which destination relays it inside a host.

Routes and the order of buckets (`ordering.py`) decide how fast a refit is.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagrl.refit.plan.coverage import SourcePart

LEAST_SHARE = 1024

RankPair = tuple[int, int]  # (sender, receiver), as channel ranks
Routes = dict[RankPair, list["PartGroup"]]  # the groups that each pair sends, in order


@dataclass(frozen=True, eq=False, slots=True)
class PartGroup:
    """Parts that the same sources hold and the same destinations want; one choice and large messages for all of them.

    `lists` are the indices of the distinct destination slice lists that want the group.
    """

    holders: tuple[int, ...]
    lists: tuple[int, ...]
    parts: tuple[SourcePart, ...]
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """The host of each channel rank. A byte is sent to each other host only once."""

    hosts: tuple[int, ...]

    def may_relay(self, sources: int) -> bool:
        """Returns whether a destination may relay to another: two are on one host, which is not that of all ranks.

        The first `sources` ranks send.
        """
        hosts = self.hosts[sources:]
        return len(set(self.hosts)) > 1 and len(set(hosts)) < len(hosts)

    def crosses(self, sender: int, receiver: int) -> bool:
        """Returns whether two ranks are on different hosts."""
        return self.hosts[sender] != self.hosts[receiver]


def group_parts(
    parts: Mapping[SourcePart, tuple[int, ...]],
    nbytes: Mapping[SourcePart, int],
    replicas: Mapping[tuple[int, ...], int],
    limit: int,
) -> list[PartGroup]:
    """Returns the parts in groups of at most `limit` bytes, small enough that each holder can send several.

    `parts` has the destination lists that want each part, `replicas` the number of destination ranks of each set of lists.
    No group is smaller than 1/`LEAST_SHARE` of the largest destination, which is too little to matter for the balance.
    """
    wanted: dict[int, int] = defaultdict(int)
    for part, lists in parts.items():
        for number in lists:
            wanted[number] += nbytes[part]
    least = max(wanted.values(), default=0) // LEAST_SHARE
    keyed: dict[tuple[tuple[int, ...], tuple[int, ...]], list[SourcePart]] = defaultdict(list)
    for part, lists in parts.items():
        keyed[part.replicas.ranks, lists].append(part)
    groups: list[PartGroup] = []
    for (holders, lists), some_parts in keyed.items():
        choices = max(len(holders), replicas[lists])
        total = sum(nbytes[part] for part in some_parts)
        most = min(limit, max(least, -(-total // (4 * choices)))) if choices > 1 else limit
        groups.extend(
            PartGroup(holders, lists, tuple(some), sum(nbytes[part] for part in some))
            for some in _split_parts(some_parts, nbytes, most)
        )
    return groups


def _split_parts(parts: Sequence[SourcePart], nbytes: Mapping[SourcePart, int], limit: int) -> Iterator[list[SourcePart]]:
    some: list[SourcePart] = []
    filled = 0
    for part in parts:
        if 2 * nbytes[part] >= limit:  # alone: it may need no staging
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
    groups: Sequence[PartGroup], ranks_of: Sequence[Sequence[int]], sources: int, limit: int, placement: Placement
) -> tuple[Routes, Routes]:
    """Chooses a source for each group of each destination, so that sources send about equally many bytes.

    Returns what sources send, and what destinations pass on of it to others on their hosts.
    `ranks_of` has the channel ranks of each destination list. Groups are assigned largest first, to the source with the
    least to send so far, and to one on the destination's host if there is one. A source that does not send to the
    destination yet counts as having a little more, so that small groups do not open new pairs.
    """
    chooser = _Chooser(groups, ranks_of, sources, limit, placement)
    for group in sorted(groups, key=lambda group: -group.nbytes):
        chooser.route(group)
    order = {id(group): index for index, group in enumerate(groups)}
    for chosen in (*chooser.direct.values(), *chooser.relays.values()):
        chosen.sort(key=lambda group: order[id(group)])
    return chooser.direct, chooser.relays


class _Chooser:
    def __init__(
        self, groups: Sequence[PartGroup], ranks_of: Sequence[Sequence[int]], sources: int, limit: int, placement: Placement
    ) -> None:
        self.direct: Routes = defaultdict(list)
        self.relays: Routes = defaultdict(list)
        self._ranks_of, self._sources, self._placement = ranks_of, sources, placement
        wanted: dict[int, int] = defaultdict(int)
        for group in groups:
            for rank in self._receivers(group):
                wanted[rank] += group.nbytes
        self._new_pair = {rank: min(limit // 4, count // 64) for rank, count in wanted.items()}
        self._load: dict[int, int] = defaultdict(int)  # bytes a source sends, or a destination receives from other hosts
        self._near: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        self._by_host: dict[tuple[int, ...], dict[int, list[int]]] = {}

    def _receivers(self, group: PartGroup) -> list[int]:
        return [rank for index in group.lists for rank in self._ranks_of[index]]

    def _receivers_by_host(self, group: PartGroup) -> dict[int, list[int]]:
        by_host = self._by_host.get(group.lists)
        if by_host is None:
            by_host = self._by_host[group.lists] = defaultdict(list)
            for rank in self._receivers(group):
                by_host[self._placement.hosts[rank]].append(rank)
        return by_host

    def route(self, group: PartGroup) -> None:
        """Chooses a sender for every destination of `group`."""
        for host, ranks in self._receivers_by_host(group).items():
            if self._holders_on(group.holders, host):
                for rank in ranks:
                    self._send(group, rank)
            else:
                self._send_once(group, ranks)

    def _send_once(self, group: PartGroup, ranks: Sequence[int]) -> None:
        """Sends the group to one of `ranks`, the one with the least from other hosts so far, which relays it to the rest."""
        leader = min(ranks, key=lambda rank: (self._load[rank], rank)) if len(ranks) > 1 else ranks[0]
        self._load[leader] += group.nbytes
        self._send(group, leader)
        for rank in ranks:
            if rank != leader:
                self.relays[leader, rank].append(group)

    def _send(self, group: PartGroup, to: int) -> None:
        holders = group.holders
        if len(holders) > 1:
            holders = self._holders_on(holders, self._placement.hosts[to]) or holders
        source = holders[0]
        if len(holders) > 1:
            load, direct, new_pair, count = self._load, self.direct, self._new_pair[to], self._sources

            def cost(source: int) -> tuple[int, int]:
                return load[source] + (0 if (source, to) in direct else new_pair), (source - to) % count

            source = min(holders, key=cost)
        self._load[source] += group.nbytes
        self.direct[source, to].append(group)

    def _holders_on(self, holders: tuple[int, ...], host: int) -> tuple[int, ...]:
        near = self._near.get((holders, host))
        if near is None:
            near = tuple(rank for rank in holders if self._placement.hosts[rank] == host)
            self._near[holders, host] = near
        return near
