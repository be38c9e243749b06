"""Which replica sends each piece, and in which order buckets go: the two choices of a refit that decide its speed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagrl.refit.cover import Piece

Pair = tuple[int, int]
"""(source, destination)"""


@dataclass(frozen=True, eq=False)
class Block:
    """Pieces that the same sources hold, chosen as one: large messages, and few choices even for the largest models."""

    ranks: tuple[int, ...]
    order: int
    pieces: tuple[Piece, ...]
    nbytes: int


def choose_sources(
    wanted: Sequence[tuple[list[Piece], tuple[int, ...]]], sources: int, bucket_bytes: int
) -> dict[Pair, list[Piece]]:
    """One source for each piece of each destination, so that sources send about equally many bytes.

    `wanted` has the pieces of each distinct destination and the destination ranks that want them. Blocks are given away
    largest first, to the source with the least to send so far; a source that does not yet send to the destination counts
    as having a little more, so that small pieces do not open new pairs.
    """
    load = [0] * sources
    taken: dict[Pair, list[Block]] = defaultdict(list)
    offers = [(block, rank) for pieces, ranks in wanted for block in _blocks(pieces, bucket_bytes) for rank in ranks]
    received = {rank: sum(piece.nbytes for piece in pieces) for pieces, ranks in wanted for rank in ranks}
    for block, destination in sorted(offers, key=lambda offer: -offer[0].nbytes):
        new_pair = min(bucket_bytes // 4, received[destination] // 64)

        def cost(source: int, to: int = destination, new_pair: int = new_pair) -> tuple[int, int]:
            return load[source] + (0 if (source, to) in taken else new_pair), (source - to) % sources

        source = min(block.ranks, key=cost)
        load[source] += block.nbytes
        taken[source, destination].append(block)
    return {pair: _in_order(blocks) for pair, blocks in taken.items()}


def _in_order(blocks: list[Block]) -> list[Piece]:
    return [piece for block in sorted(blocks, key=lambda block: block.order) for piece in block.pieces]


def _blocks(pieces: Sequence[Piece], bucket_bytes: int) -> list[Block]:
    """Pieces grouped by who holds them, cut so that each holder may get several blocks, none above a bucket."""
    groups: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        groups[piece.replicas.ranks].append(piece)
    blocks: list[Block] = []
    for ranks, group in groups.items():
        total = sum(piece.nbytes for piece in group)
        limit = min(bucket_bytes, -(-total // (4 * len(ranks)))) if len(ranks) > 1 else bucket_bytes
        for part in _cut(group, limit):
            blocks.append(Block(ranks, len(blocks), tuple(part), sum(piece.nbytes for piece in part)))
    return blocks


def _cut(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    part: list[Piece] = []
    filled = 0
    for piece in pieces:
        if part and filled + piece.nbytes > limit:
            yield part
            part, filled = [], 0
        part.append(piece)
        filled += piece.nbytes
    if part:
        yield part


def order_rounds(sizes: Mapping[Pair, Sequence[int]]) -> Iterator[tuple[int, int, int, int]]:
    """Buckets in rounds, as (round, source, destination, position within the pair).

    `sizes` has the bytes of each pair's buckets. In a round every source and every destination has at most one bucket;
    those with the most left come first, so that the busiest link is never idle while it could work.
    """
    waiting: dict[int, dict[int, int]] = defaultdict(dict)  # destination -> source -> next position
    to_send: dict[int, int] = defaultdict(int)
    to_receive: dict[int, int] = defaultdict(int)
    for (source, destination), buckets in sizes.items():
        waiting[destination][source] = 0
        to_send[source] += sum(buckets)
        to_receive[destination] += sum(buckets)
    number = 0
    while waiting:
        busy: set[int] = set()
        for destination in sorted(waiting, key=lambda rank: (-to_receive[rank], rank)):
            free = [source for source in waiting[destination] if source not in busy]
            if not free:
                continue
            source = max(free, key=lambda rank: (to_send[rank], -rank))
            busy.add(source)
            position = waiting[destination][source]
            nbytes = sizes[source, destination][position]
            to_send[source] -= nbytes
            to_receive[destination] -= nbytes
            _advance(waiting, destination, source, len(sizes[source, destination]))
            yield number, source, destination, position
        number += 1


def _advance(waiting: dict[int, dict[int, int]], destination: int, source: int, buckets: int) -> None:
    waiting[destination][source] += 1
    if waiting[destination][source] == buckets:
        del waiting[destination][source]
        if not waiting[destination]:
            del waiting[destination]
