"""Turns a plan's part groups into moves and messages, and computes how many bytes each end must stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagrl.refit.fp8 import FP8, in_blocks
from dagrl.refit.plan.coverage import PlacedPart, SlicesOfRanks, SourcePart, local_box
from dagrl.refit.plan.routes import PartGroup
from dagrl.refit.slices import Box, Scales, WeightSlice, is_contiguous_box, tensor_shapes
from dagrl.refit.transfers import Move, MoveSide, TransferMessage, aligned, box_of_run, split_messages

PlacedParts = Mapping[SourcePart, Sequence[PlacedPart]]
"""Where a destination writes each part: in one slice, or in several."""

Staged = tuple[int, int]
"""Bytes that the source packs, and bytes that the destination unpacks."""


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
