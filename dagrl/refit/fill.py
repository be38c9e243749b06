"""Filling buckets: which blocks of a pair travel together, and how much of each bucket either end has to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagrl.refit.block_moves import BlockMoves, PiecesOfParts, Staged
from dagrl.refit.cover import Part, SourceIndex, extents
from dagrl.refit.moves import boxes_adjoin
from dagrl.refit.schedule import Block, Pair

Contents = tuple[tuple[Block, ...], int, int, int]
"""Blocks of a bucket, its bytes, and those that are packed and unpacked; see `PlannedBucket`."""


@dataclass(frozen=True)
class Limits:
    """Bytes of a bucket at most, of what either end stages of it, and at least of a message that is sent directly."""

    bucket: int
    staged: int
    direct: int


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes on the wire, and up to where what follows may begin."""

    exact: int
    aligned: int


class BucketFilling:
    """Puts the blocks of one pair of ranks after the other into buckets.

    `pieces` has what each description of destinations makes of its parts, `description` the number of that of each
    destination rank. `in_several_places`: destinations may want a part more than once.
    """

    def __init__(
        self,
        index: SourceIndex,
        description: Mapping[int, int],
        pieces: Sequence[PiecesOfParts],
        nbytes: Mapping[Part, PartBytes],
        moves: BlockMoves,
        limits: Limits,
        in_several_places: bool,
    ) -> None:
        self._index, self._description, self._pieces, self._nbytes = index, description, pieces, nbytes
        self._moves, self._limits, self._in_several_places = moves, limits, in_several_places
        self._bytes_of: dict[tuple[int, Block], PartBytes] = {}
        self._runs: dict[tuple[int, Block], bool] = {}

    def fill(self, pair: Pair, blocks: Sequence[Block]) -> list[Contents]:
        """Buckets of one pair, within the limits.

        Large parts that are whole rows come first and last: where nothing is cast they need no staging, so nothing has to be
        packed before the first message and unpacked after the last.
        """
        direct: list[tuple[Block, ...]] = [(block,) for block in blocks if self._fills_a_bucket(block)]
        buckets = direct[:1]
        some: list[Block] = []
        end = packed = unpacked = 0
        staged = 0, 0
        for block in blocks:
            if self._fills_a_bucket(block):
                continue
            nbytes = self._block_bytes(pair[1], block).aligned
            if self._limits.staged < self._limits.bucket:  # otherwise the bucket's own limit is reached first
                staged = self._staged(pair, block)
            most = max(packed + staged[0], unpacked + staged[1])
            if some and (end + nbytes > self._limits.bucket or most > self._limits.staged):
                buckets.append(tuple(some))
                some, end, packed, unpacked = [], 0, 0, 0
            some.append(block)
            end, packed, unpacked = end + nbytes, packed + staged[0], unpacked + staged[1]
        buckets += [tuple(some)] if some else []
        return [self.contents(pair, chosen) for chosen in [*buckets, *direct[1:]]]

    def contents(self, pair: Pair, blocks: tuple[Block, ...]) -> Contents:
        nbytes = sum(self._block_bytes(pair[1], block).exact for block in blocks)
        staged = [self._staged(pair, block, alone=len(blocks) == 1) for block in blocks]
        return blocks, nbytes, sum(packed for packed, _ in staged), sum(unpacked for _, unpacked in staged)

    def _staged(self, pair: Pair, block: Block, alone: bool = False) -> Staged:
        """What the ends stage of a block; moves are only made where some of it may not be staged."""
        if self._may_be_direct(pair[1], block):
            return self._moves.staged_bytes(*pair, block, alone)
        nbytes = self._block_bytes(pair[1], block).aligned
        return nbytes, nbytes

    def _may_be_direct(self, rank: int, block: Block) -> bool:
        """Whether `cut_messages` could find a run in it: a cheap look, which says no only where there is none."""
        number = self._description[rank]
        found = self._runs.get((number, block))
        if found is None:
            pieces = [piece for part in block.parts for piece in self._pieces[number][part]]
            found = self._runs[number, block] = (
                len(pieces) == 1
                or any(self._nbytes[part].aligned >= self._limits.direct for part in block.parts)
                or any(
                    first.target.tensor == second.target.tensor and boxes_adjoin(first.target_local, second.target_local)
                    for first, second in pairwise(pieces)
                )
            )
        return found

    def _fills_a_bucket(self, block: Block) -> bool:
        """Whether it is likely one piece of memory on both sides, and large enough to be a bucket by itself."""
        part = block.parts[0]
        if len(block.parts) > 1 or 4 * block.nbytes < self._limits.bucket:
            return False
        around = extents(self._index[part.name])
        return all(edges == end for edges, end in zip(part.box[1:], around[1:], strict=True))

    def _block_bytes(self, rank: int, block: Block) -> PartBytes:
        """Of a block for one destination; through an alias it may want a part in two places."""
        number = self._description[rank]
        key = number if self._in_several_places else -1, block
        found = self._bytes_of.get(key)
        if found is None:
            pieces = self._pieces[number]
            found = self._bytes_of[key] = PartBytes(
                sum(self._nbytes[part].exact * len(pieces[part]) for part in block.parts),
                sum(self._nbytes[part].aligned * len(pieces[part]) for part in block.parts),
            )
        return found
