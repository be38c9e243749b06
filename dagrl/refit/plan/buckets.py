"""Fills buckets: which part groups of a pair of ranks share a bucket, their moves and messages, and what each end stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dagrl.refit.fp8 import FP8, in_blocks
from dagrl.refit.plan.coverage import PlacedPart, SlicesOfRanks, SourceIndex, SourcePart, extents, local_box
from dagrl.refit.plan.routes import PartGroup, RankPair
from dagrl.refit.slices import Box, Scales, WeightSlice, is_contiguous_box, tensor_shapes
from dagrl.refit.transfers import Move, MoveSide, TransferMessage, aligned, box_of_run, boxes_adjoin, split_messages

PlacedParts = Mapping[SourcePart, Sequence[PlacedPart]]  # where a destination writes each part: in one slice, or in several
Staged = tuple[int, int]  # bytes that the source packs, and bytes that the destination unpacks


@dataclass(frozen=True)
class _GroupMessages:
    """The moves of a group between two ranks: `large` messages, and `small` moves that share one message with other groups'.

    `alone` is what is staged if the group fills a bucket, `among_others` if it shares a bucket.
    """

    large: tuple[TransferMessage, ...]
    small: tuple[Move, ...]
    alone: Staged
    among_others: Staged


class MessageBuilder:
    """Builds moves lazily, once for all ranks that hold a group in the same place and all replicas that want it.

    Ranks are channel ranks; the first `sources` of them train. `held` and `wanted` are the slice lists of both sides.
    `placed_parts` has those of each list in `wanted`. `dtypes` are the defaults of held and of wanted slices.
    """

    def __init__(
        self,
        held: SlicesOfRanks,
        wanted: SlicesOfRanks,
        placed_parts: Sequence[PlacedParts],
        sources: int,
        dtypes: tuple[str, str],
        direct_bytes: int,
    ) -> None:
        self._sources, self._dtype, self._direct_bytes = sources, dtypes[0], direct_bytes
        self._placed_parts: list[PlacedParts] = [*({} for _ in held), *placed_parts]  # of each slice list, of both sides
        self._shapes = [tensor_shapes(slices) for slices, _ in (*held, *wanted)]
        self._dtypes = [
            {weight.tensor: weight.dtype or default for weight in slices}
            for some, default in zip((held, wanted), dtypes, strict=True)
            for slices, _ in some
        ]
        ranks = [*(ranks for _, ranks in held), *([sources + rank for rank in ranks] for _, ranks in wanted)]
        self._description = {rank: number for number, some in enumerate(ranks) for rank in some}
        self._first_alike: dict[PartGroup, dict[int, int]] = {}
        self._split_groups: dict[tuple[int, int, PartGroup], _GroupMessages] = {}

    def messages(self, source: int, destination: int, groups: Sequence[PartGroup]) -> tuple[TransferMessage, ...]:
        """Returns the messages of one bucket: the large ones, then one message of all small moves."""
        split = [self._split(source, destination, group) for group in groups]
        large = [message for messages in split for message in messages.large]
        small = tuple(move for messages in split for move in messages.small)
        return (*large, *([TransferMessage(small)] if small else []))

    def staged_bytes(self, source: int, destination: int, group: PartGroup, alone: bool) -> Staged:
        """Returns how many bytes of a group each end stages: what is not contiguous there, or is cast.

        `alone`: the group fills a bucket. Transposed tensors need more than this. Small moves of several groups always
        count as staged, even if all moves of a bucket form one run that is sent directly.
        """
        messages = self._split(source, destination, group)
        return messages.alone if alone else messages.among_others

    def _split(self, source: int, destination: int, group: PartGroup) -> _GroupMessages:
        key = self._alike(source, group), self._description[destination], group
        split = self._split_groups.get(key)
        if split is None:
            placed_parts = self._placed_parts[key[1]]
            moves = [self._move(source, placed_part) for part in group.parts for placed_part in placed_parts[part]]
            large, small = split_messages(moves, self._direct_bytes)
            rest = sum(aligned(move.nbytes) for move in small)
            packed, unpacked = self._staged(large, source, "source"), self._staged(large, destination, "target")
            among_others = alone = packed + rest, unpacked + rest
            if not large:
                message = TransferMessage(small)
                alone = (
                    0 if self._is_direct(message, source, "source") else rest,
                    0 if self._is_direct(message, destination, "target") else rest,
                )
            split = self._split_groups[key] = _GroupMessages(large, small, alone, among_others)
        return split

    def _staged(self, messages: Sequence[TransferMessage], rank: int, side: MoveSide) -> int:
        return sum(aligned(message.nbytes) for message in messages if not self._is_direct(message, rank, side))

    def _is_direct(self, message: TransferMessage, rank: int, side: MoveSide) -> bool:
        run, number = box_of_run(message.moves, side), self._description[rank]
        if run is None or self._dtypes[number][run[0]] != message.moves[0].dtype:
            return False
        return is_contiguous_box(*run, self._shapes[number])

    def _alike(self, source: int, group: PartGroup) -> int:
        """Returns the first rank that holds `group` where `source` does; for a relaying rank, a number below 0."""
        if source >= self._sources:
            return -self._description[source]
        if len(group.holders) == 1:
            return source
        alike = self._first_alike.get(group)
        if alike is None:
            first: dict[tuple[int, ...], int] = {}
            alike = self._first_alike[group] = {
                rank: first.setdefault(tuple(id(part.replicas.slices[rank]) for part in group.parts), rank)
                for rank in group.holders
            }
        return alike[source]

    def _move(self, sender: int, placed_part: PlacedPart) -> Move:
        part, target = placed_part.part, placed_part.target
        relayed = self._placed_parts[self._description[sender]][part][0].target if sender >= self._sources else None
        source = relayed or part.replicas.slices[sender]
        return Move(
            target.name,
            part.box,
            FP8 if target.scales is not None else next(iter(part.replicas.slices.values())).dtype or self._dtype,
            source.tensor,
            local_box(source, part.box),
            target.tensor,
            placed_part.target_local,
            _scales_of(target, part.box),
            _scales_of(source, part.box),
        )


def _scales_of(whole: WeightSlice, box: Box) -> Scales | None:
    """Returns where the scales of `box`, which is inside `held`, are stored."""
    if whole.scales is None:
        return None
    blocks = WeightSlice(whole.name, in_blocks(whole.box), whole.scales.tensor, whole.scales.local)
    return Scales(whole.scales.tensor, local_box(blocks, in_blocks(box)))


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


@dataclass
class BucketFiller:
    """Puts the groups of each pair of ranks into buckets.

    `description` has the number of the slice list of each destination rank, `placed_parts` the placed parts of each list.
    `in_several_places`: a destination may want a part more than once.
    """

    index: SourceIndex
    description: Mapping[int, int]
    placed_parts: Sequence[PlacedParts]
    nbytes: Mapping[SourcePart, PartBytes]
    moves: MessageBuilder
    limits: BucketLimits
    in_several_places: bool
    _bytes_of: dict[tuple[int, PartGroup], PartBytes] = field(default_factory=dict)
    _runs: dict[tuple[int, PartGroup], bool] = field(default_factory=dict)
    _filled: dict[tuple[int, int, tuple[PartGroup, ...]], list[BucketContents]] = field(default_factory=dict)

    def fill(self, pair: RankPair, groups: Sequence[PartGroup]) -> list[BucketContents]:
        """Returns the buckets of one pair, within the limits. Replicas of a destination that want the same share them."""
        key = pair[0], self.description[pair[1]], tuple(groups)
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
            if self.limits.staged < self.limits.bucket:  # otherwise the bucket's own limit is reached first
                staged = self._staged(pair, group)
            most = max(packed + staged[0], unpacked + staged[1])
            if some and (end + nbytes > self.limits.bucket or most > self.limits.staged):
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
            return self.moves.staged_bytes(*pair, group, alone)
        nbytes = self._group_bytes(pair[1], group).aligned
        return nbytes, nbytes

    def _may_be_direct(self, rank: int, group: PartGroup) -> bool:
        """Returns whether `split_messages` may find a run in the group. Cheap; False only if there is none."""
        number = self.description[rank]
        has_run = self._runs.get((number, group))
        if has_run is None:
            placed_parts = [placed_part for part in group.parts for placed_part in self.placed_parts[number][part]]
            has_run = self._runs[number, group] = (
                len(placed_parts) == 1
                or any(self.nbytes[part].aligned >= self.limits.direct for part in group.parts)
                or any(
                    first.target.tensor == second.target.tensor and boxes_adjoin(first.target_local, second.target_local)
                    for first, second in pairwise(placed_parts)
                )
            )
        return has_run

    def _fills_a_bucket(self, group: PartGroup) -> bool:
        """Returns whether the group is probably contiguous on both sides, and large enough to be a bucket by itself."""
        part = group.parts[0]
        if len(group.parts) > 1 or 4 * group.nbytes < self.limits.bucket:
            return False
        around = extents(self.index[part.name])
        return all(edges == end for edges, end in zip(part.box[1:], around[1:], strict=True))

    def _group_bytes(self, rank: int, group: PartGroup) -> PartBytes:
        """Returns the bytes of a group for one destination, which through an alias may want a part twice."""
        number = self.description[rank]
        key = number if self.in_several_places else -1, group
        sizes = self._bytes_of.get(key)
        if sizes is None:
            placed_parts = self.placed_parts[number]
            sizes = self._bytes_of[key] = PartBytes(
                sum(self.nbytes[part].exact * len(placed_parts[part]) for part in group.parts),
                sum(self.nbytes[part].aligned * len(placed_parts[part]) for part in group.parts),
            )
        return sizes
