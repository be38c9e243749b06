"""Fills buckets: which part groups of a pair of ranks share a bucket, and how many bytes of it each end stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagrl.refit.plan.coverage import SourceIndex, SourcePart, extents
from dagrl.refit.plan.messages import MessageBuilder, PlacedParts, Staged
from dagrl.refit.plan.routes import PartGroup, RankPair
from dagrl.refit.transfers import boxes_adjoin

BucketContents = tuple[tuple[PartGroup, ...], int, int, int]
"""Groups of a bucket, its bytes, and its packed and unpacked bytes; see `PlannedBucket`."""


@dataclass(frozen=True)
class BucketLimits:
    """In bytes: the most of a bucket, the most that each end stages of it, the least of a message that is sent directly."""

    bucket: int
    staged: int
    direct: int


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes on the wire, and the offset at which the next part may start."""

    exact: int
    aligned: int


class BucketFiller:
    """Puts the groups of each pair of ranks into buckets.

    `placed_parts` has the placed parts of each destination slice list, `description` the number of the list of each
    destination rank. `in_several_places`: a destination may want a part more than once.
    """

    def __init__(
        self,
        index: SourceIndex,
        description: Mapping[int, int],
        placed_parts: Sequence[PlacedParts],
        nbytes: Mapping[SourcePart, PartBytes],
        moves: MessageBuilder,
        limits: BucketLimits,
        in_several_places: bool,
    ) -> None:
        self._index, self._description, self._placed_parts, self._nbytes = index, description, placed_parts, nbytes
        self._moves, self._limits, self._in_several_places = moves, limits, in_several_places
        self._bytes_of: dict[tuple[int, PartGroup], PartBytes] = {}
        self._runs: dict[tuple[int, PartGroup], bool] = {}
        self._filled: dict[tuple[int, int, tuple[PartGroup, ...]], list[BucketContents]] = {}

    def fill(self, pair: RankPair, groups: Sequence[PartGroup]) -> list[BucketContents]:
        """Returns the buckets of one pair, within the limits. Replicas of a destination that want the same share them."""
        key = pair[0], self._description[pair[1]], tuple(groups)
        buckets = self._filled.get(key)
        if buckets is None:
            buckets = self._filled[key] = self._fill(pair, groups)
        return buckets

    def _fill(self, pair: RankPair, groups: Sequence[PartGroup]) -> list[BucketContents]:
        """Fills buckets.

        Large parts of whole rows come first and last. Unless they are cast they need no staging, so nothing has to be packed
        before the first message or unpacked after the last.
        """
        direct: list[tuple[PartGroup, ...]] = [(group,) for group in groups if self._fills_a_bucket(group)]
        buckets = direct[:1]
        some: list[PartGroup] = []
        end = packed = unpacked = 0
        staged = 0, 0
        for group in groups:
            if self._fills_a_bucket(group):
                continue
            nbytes = self._group_bytes(pair[1], group).aligned
            if self._limits.staged < self._limits.bucket:  # otherwise the bucket's own limit is reached first
                staged = self._staged(pair, group)
            most = max(packed + staged[0], unpacked + staged[1])
            if some and (end + nbytes > self._limits.bucket or most > self._limits.staged):
                buckets.append(tuple(some))
                some, end, packed, unpacked = [], 0, 0, 0
            some.append(group)
            end, packed, unpacked = end + nbytes, packed + staged[0], unpacked + staged[1]
        buckets += [tuple(some)] if some else []
        return [self.contents(pair, chosen) for chosen in [*buckets, *direct[1:]]]

    def contents(self, pair: RankPair, groups: tuple[PartGroup, ...]) -> BucketContents:
        """Returns a bucket of `groups`, with its sizes."""
        nbytes = sum(self._group_bytes(pair[1], group).exact for group in groups)
        staged = [self._staged(pair, group, alone=len(groups) == 1) for group in groups]
        return groups, nbytes, sum(packed for packed, _ in staged), sum(unpacked for _, unpacked in staged)

    def _staged(self, pair: RankPair, group: PartGroup, alone: bool = False) -> Staged:
        """Returns what each end stages of a group. Builds moves only if some of it may be sent directly."""
        if self._may_be_direct(pair[1], group):
            return self._moves.staged_bytes(*pair, group, alone)
        nbytes = self._group_bytes(pair[1], group).aligned
        return nbytes, nbytes

    def _may_be_direct(self, rank: int, group: PartGroup) -> bool:
        """Returns whether `split_messages` may find a run in the group. Cheap; False only if there is none."""
        number = self._description[rank]
        has_run = self._runs.get((number, group))
        if has_run is None:
            placed_parts = [placed_part for part in group.parts for placed_part in self._placed_parts[number][part]]
            has_run = self._runs[number, group] = (
                len(placed_parts) == 1
                or any(self._nbytes[part].aligned >= self._limits.direct for part in group.parts)
                or any(
                    first.target.tensor == second.target.tensor and boxes_adjoin(first.target_local, second.target_local)
                    for first, second in pairwise(placed_parts)
                )
            )
        return has_run

    def _fills_a_bucket(self, group: PartGroup) -> bool:
        """Returns whether the group is probably contiguous on both sides, and large enough to be a bucket by itself."""
        part = group.parts[0]
        if len(group.parts) > 1 or 4 * group.nbytes < self._limits.bucket:
            return False
        around = extents(self._index[part.name])
        return all(edges == end for edges, end in zip(part.box[1:], around[1:], strict=True))

    def _group_bytes(self, rank: int, group: PartGroup) -> PartBytes:
        """Returns the bytes of a group for one destination, which through an alias may want a part twice."""
        number = self._description[rank]
        key = number if self._in_several_places else -1, group
        sizes = self._bytes_of.get(key)
        if sizes is None:
            placed_parts = self._placed_parts[number]
            sizes = self._bytes_of[key] = PartBytes(
                sum(self._nbytes[part].exact * len(placed_parts[part]) for part in group.parts),
                sum(self._nbytes[part].aligned * len(placed_parts[part]) for part in group.parts),
            )
        return sizes
