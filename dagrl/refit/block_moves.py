"""The moves of a plan's blocks, how they are cut into messages, and how much of these either end has to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagrl.refit.cover import Part, Piece, SlicesOfRanks, place
from dagrl.refit.moves import Message, Move, Side, aligned, cut_messages, place_of_run
from dagrl.refit.quantize import FP8, in_blocks
from dagrl.refit.schedule import Block
from dagrl.refit.slices import Box, Scales, WeightSlice, in_one_piece, tensor_shapes

PiecesOfParts = Mapping[Part, Sequence[Piece]]
"""What a destination makes of each part, at one place or several."""

Staged = tuple[int, int]
"""Bytes that the source packs and the destination unpacks."""


@dataclass(frozen=True)
class _Cut:
    """The moves of a block between two ranks: messages of their own, and moves that share one with those of other blocks.

    `alone` and `among_others` say what is staged where the block fills a bucket, and where it shares one.
    """

    large: tuple[Message, ...]
    small: tuple[Move, ...]
    alone: Staged
    among_others: Staged


class BlockMoves:
    """Makes moves when asked, once for all ranks that hold a block alike and all replicas that want it.

    Ranks are channel ranks, of which `sources` train; `held` and `wanted` have the descriptions of both sides. `pieces` are
    those of each description in `wanted`; `dtypes` are those of held and of wanted slices that name none.
    """

    def __init__(
        self,
        held: SlicesOfRanks,
        wanted: SlicesOfRanks,
        pieces: Sequence[PiecesOfParts],
        sources: int,
        dtypes: tuple[str, str],
        direct_bytes: int,
    ) -> None:
        self._sources, self._dtype, self._direct_bytes = sources, dtypes[0], direct_bytes
        self._pieces: list[PiecesOfParts] = [*({} for _ in held), *pieces]  # of each description, of both sides
        self._shapes = [tensor_shapes(slices) for slices, _ in (*held, *wanted)]
        self._dtypes = [
            {one.tensor: one.dtype or default for one in slices}
            for some, default in zip((held, wanted), dtypes, strict=True)
            for slices, _ in some
        ]
        ranks = [*(ranks for _, ranks in held), *([sources + rank for rank in ranks] for _, ranks in wanted)]
        self._description = {rank: number for number, some in enumerate(ranks) for rank in some}
        self._first_alike: dict[Block, dict[int, int]] = {}
        self._cuts: dict[tuple[int, int, Block], _Cut] = {}

    def messages(self, source: int, destination: int, blocks: Sequence[Block]) -> tuple[Message, ...]:
        """What goes from `source` to `destination` as one bucket: large messages, then all that is small as one."""
        cuts = [self._cut(source, destination, block) for block in blocks]
        small = tuple(move for cut in cuts for move in cut.small)
        return (*(message for cut in cuts for message in cut.large), *([Message(small)] if small else []))

    def staged_bytes(self, source: int, destination: int, block: Block, alone: bool) -> Staged:
        """How much of a block its ends stage: what is in several pieces there, or cast; `alone`: if it fills a bucket.

        Tensors that do not have their elements in order turn out to need more. Small moves of several blocks count as
        staged, also where all of a bucket's turn out to be one run, which goes straight.
        """
        cut = self._cut(source, destination, block)
        return cut.alone if alone else cut.among_others

    def _cut(self, source: int, destination: int, block: Block) -> _Cut:
        key = self._alike(source, block), self._description[destination], block
        cut = self._cuts.get(key)
        if cut is None:
            pieces = self._pieces[key[1]]
            moves = [self._move(source, piece) for part in block.parts for piece in pieces[part]]
            large, small = cut_messages(moves, self._direct_bytes)
            rest = sum(aligned(move.nbytes) for move in small)
            packed, unpacked = self._staged(large, source, "source"), self._staged(large, destination, "target")
            among_others = alone = packed + rest, unpacked + rest
            if not large:
                message = Message(small)
                alone = (
                    0 if self._is_direct(message, source, "source") else rest,
                    0 if self._is_direct(message, destination, "target") else rest,
                )
            cut = self._cuts[key] = _Cut(large, small, alone, among_others)
        return cut

    def _staged(self, messages: Sequence[Message], rank: int, side: Side) -> int:
        return sum(aligned(message.nbytes) for message in messages if not self._is_direct(message, rank, side))

    def _is_direct(self, message: Message, rank: int, side: Side) -> bool:
        run, number = place_of_run(message.moves, side), self._description[rank]
        if run is None or self._dtypes[number][run[0]] != message.moves[0].dtype:
            return False
        return in_one_piece(*run, self._shapes[number])

    def _alike(self, source: int, block: Block) -> int:
        """The first rank that holds `block` in the same places as `source`; of ranks that pass on, one below 0."""
        if source >= self._sources:
            return -self._description[source]
        if len(block.holders) == 1:
            return source
        alike = self._first_alike.get(block)
        if alike is None:
            first: dict[tuple[int, ...], int] = {}
            alike = self._first_alike[block] = {
                rank: first.setdefault(tuple(id(part.replicas.slices[rank]) for part in block.parts), rank)
                for rank in block.holders
            }
        return alike[source]

    def _move(self, sender: int, piece: Piece) -> Move:
        part, target = piece.part, piece.target
        relayed = self._pieces[self._description[sender]][part][0].target if sender >= self._sources else None
        held = relayed or part.replicas.slices[sender]
        return Move(
            target.name,
            part.box,
            _wire_dtype(part, target, self._dtype),
            held.tensor,
            place(held, part.box),
            target.tensor,
            piece.target_local,
            _scales_of(target, part.box),
            _scales_of(relayed, part.box) if relayed else None,
        )


def _wire_dtype(part: Part, target: WeightSlice, dtype: str) -> str:
    return FP8 if target.scales is not None else next(iter(part.replicas.slices.values())).dtype or dtype


def _scales_of(held: WeightSlice, box: Box) -> Scales | None:
    """Where the scales of `box`, a part of `held`, lie."""
    if held.scales is None:
        return None
    blocks = WeightSlice(held.name, in_blocks(held.box), held.scales.tensor, held.scales.local)
    return Scales(held.scales.tensor, place(blocks, in_blocks(box)))
