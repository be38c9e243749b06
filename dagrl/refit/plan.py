"""The plan of a refit: who sends which box to whom, in which bucket and in which order; made once, replayed for ever.

Boxes of both sides are intersected, one source is chosen for each piece among the ranks that hold it, pieces are packed
into buckets, and buckets are ordered in rounds in which no receiver hears from two senders and no sender serves two
receivers. Ranks here are channel ranks: sources come first, then destinations.

    plan = plan_refit(train_slices, generation_slices, dtype="bfloat16")
    print(plan.summary())
    mine = plan.for_rank(channel_rank)      # picklable; all that one worker needs
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagrl.errors import RefitPlanError
from dagrl.refit.cover import (
    Piece,
    SourceIndex,
    check_parameters,
    cover,
    distinct_lists,
    index_sources,
    place,
    prove_covered,
    source_name,
)
from dagrl.refit.schedule import choose_sources, order_rounds
from dagrl.refit.slices import Box, WeightSlice, volume

BUCKET_BYTES = 64 << 20
TIED_HEAD = {"lm_head.weight": "model.embed_tokens.weight"}
"""Alias for models with tied embeddings: a destination that keeps a head of its own gets the embedding."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
ALIGNMENT = 16  # bytes; views of every dtype into a bucket start at a multiple of it


@dataclass(frozen=True, slots=True)
class Move:
    """One box of a parameter on its way: from a box of a source tensor into a box of a destination tensor.

    `dtype` is that of the source and of the wire; a destination of another floating-point dtype casts what it receives.
    """

    name: str
    box: Box
    dtype: str
    source: str
    source_local: Box
    target: str
    target_local: Box

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return volume(self.box) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TransferBucket:
    """Moves that go from `source` to `destination` as one message of `nbytes`, in round `round`."""

    round: int
    source: int
    destination: int
    moves: tuple[Move, ...]
    nbytes: int


def bucket_offsets(moves: Sequence[Move]) -> list[int]:
    """Byte offset of each move in its bucket."""
    offsets = [0]
    for move in moves[:-1]:
        offsets.append(offsets[-1] + _aligned(move.nbytes))
    return offsets


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class RankPlan:
    """What one channel rank does in a refit, in order. `digest` is the whole plan's, equal on all ranks."""

    rank: int
    size: int
    digest: str
    sends: tuple[TransferBucket, ...]
    receives: tuple[TransferBucket, ...]

    @property
    def staging_bytes(self) -> int:
        """Memory for packed buckets: two of the largest."""
        return 2 * max((bucket.nbytes for bucket in (*self.sends, *self.receives)), default=0)


@dataclass(frozen=True)
class PlanSummary:
    """Bytes of a plan. `pairs` maps (source, destination) to bytes; `sent` and `received` have one entry a rank."""

    pairs: Mapping[tuple[int, int], int]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    staging_bytes: int
    rounds: int
    buckets: int

    def __str__(self) -> str:
        lines = [
            f"refit of {_mb(sum(self.received))} from {len(self.sent)} to {len(self.received)} ranks, "
            f"{self.buckets} buckets in {self.rounds} rounds, at most {_mb(self.staging_bytes)} of staging a rank",
            f"sent by a rank: {_spread(self.sent)}; received by a rank: {_spread(self.received)}",
        ]
        lines += [f"  {source:>4} -> {to:<4} {_mb(count):>12}" for (source, to), count in sorted(self.pairs.items())]
        return "\n".join(lines)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.3f} MB"


def _spread(counts: Sequence[int]) -> str:
    mean = sum(counts) / len(counts)
    return f"{_mb(min(counts))} to {_mb(max(counts))}, largest over mean {max(counts) / mean if mean else 1:.3f}"


@dataclass(frozen=True)
class RefitPlan:
    """A whole refit. `sources` and `destinations` count the ranks of each side; `buckets` are in the order of rounds."""

    sources: int
    destinations: int
    digest: str
    buckets: tuple[TransferBucket, ...]

    @property
    def size(self) -> int:
        """Ranks of the channel."""
        return self.sources + self.destinations

    def for_rank(self, rank: int) -> RankPlan:
        """The part of channel rank `rank`."""
        if not 0 <= rank < self.size:
            raise RefitPlanError(f"rank {rank} is outside a refit of {self.size} ranks")
        sends = tuple(bucket for bucket in self.buckets if bucket.source == rank)
        receives = tuple(bucket for bucket in self.buckets if bucket.destination == rank)
        return RankPlan(rank, self.size, self.digest, sends, receives)

    def summary(self) -> PlanSummary:
        """Bytes per pair, balance, staging memory."""
        pairs: dict[tuple[int, int], int] = defaultdict(int)
        sent, received, largest = [0] * self.sources, [0] * self.destinations, 0
        for bucket in self.buckets:
            pairs[bucket.source, bucket.destination] += bucket.nbytes
            sent[bucket.source] += bucket.nbytes
            received[bucket.destination - self.sources] += bucket.nbytes
            largest = max(largest, bucket.nbytes)
        rounds = 1 + max((bucket.round for bucket in self.buckets), default=-1)
        return PlanSummary(dict(pairs), tuple(sent), tuple(received), 2 * largest, rounds, len(self.buckets))


def plan_refit(
    sources: Sequence[Sequence[WeightSlice]],
    destinations: Sequence[Sequence[WeightSlice]],
    *,
    dtype: str,
    dtypes: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> RefitPlan:
    """Plan the transfer of every box that `destinations[i]` describe from the ranks `sources[j]` that hold it.

    `dtype` is the dtype of the source tensors (`float32`, `bfloat16`, ...), `dtypes` exceptions by parameter name. `aliases`
    maps a destination's parameter to the one that feeds it where the sources lack its own name (`TIED_HEAD`). Ranks that
    hold the same may pass one list object, which is then planned once.

    Raises RefitPlanError naming the parameter when only one side has it, when shapes differ, when a part of it is held by
    no source, or when an element would be written twice.
    """
    _check_dtypes([dtype, *(dtypes or {}).values()])
    index = index_sources(sources)
    check_parameters(index, destinations, aliases or {})
    maker = _Planner(index, dtype, dtypes or {}, aliases or {}, bucket_bytes)
    wanted = [(maker.pieces(slices), ranks) for slices, ranks in distinct_lists(destinations)]
    chosen = choose_sources(wanted, len(sources), bucket_bytes)
    pairs = {
        (source, len(sources) + to): maker.fill_buckets(source, pieces) for (source, to), pieces in sorted(chosen.items())
    }
    sizes = {pair: [nbytes for _, nbytes in buckets] for pair, buckets in pairs.items()}
    buckets = tuple(
        TransferBucket(number, source, to, *pairs[source, to][position])
        for number, source, to, position in order_rounds(sizes)
    )
    _check_complete(wanted, buckets, len(sources))
    digest = _digest(buckets, len(sources), len(destinations))
    return RefitPlan(len(sources), len(destinations), digest, buckets)


def _check_dtypes(names: Sequence[str]) -> None:
    for name in names:
        if name not in ITEM_BYTES:
            raise RefitPlanError(f"dtype {name!r} cannot be sent in a refit; known are {', '.join(ITEM_BYTES)}")


@dataclass(frozen=True)
class _Planner:
    """What the steps of `plan_refit` share."""

    index: SourceIndex
    dtype: str
    dtypes: Mapping[str, str]
    aliases: Mapping[str, str]
    bucket_bytes: int
    moves: dict[tuple[int, int], Move] = field(default_factory=dict)  # by the identities of piece and source slice

    def pieces(self, slices: Sequence[WeightSlice]) -> list[Piece]:
        """The proved pieces of one destination rank."""
        pieces: list[Piece] = []
        for held in slices:
            name = source_name(held.name, self.index, self.aliases)
            pieces.extend(cover(held, self.index, name, ITEM_BYTES[self._dtype(name)], self.bucket_bytes))
        prove_covered(slices, pieces)
        return pieces

    def _dtype(self, name: str) -> str:
        return self.dtypes.get(name, self.dtype)

    def fill_buckets(self, source: int, pieces: Sequence[Piece]) -> list[tuple[tuple[Move, ...], int]]:
        """Buckets of one pair, `(moves, bytes)`, each of at most `bucket_bytes`."""
        buckets: list[tuple[tuple[Move, ...], int]] = []
        moves: list[Move] = []
        end = 0
        for piece in pieces:
            if moves and _aligned(end) + piece.nbytes > self.bucket_bytes:
                buckets.append((tuple(moves), end))
                moves, end = [], 0
            moves.append(self._move(source, piece))
            end = _aligned(end) + piece.nbytes
        return [*buckets, (tuple(moves), end)]

    def _move(self, source: int, piece: Piece) -> Move:
        """The piece as sent by `source`; ranks that hold it alike share one object."""
        held = piece.replicas.slices[source]
        move = self.moves.get((id(piece), id(held)))
        if move is None:
            move = self.moves[id(piece), id(held)] = Move(
                piece.target.name,
                piece.box,
                self._dtype(held.name),
                held.tensor,
                place(held, piece.box),
                piece.target.tensor,
                piece.target_local,
            )
        return move


def _check_complete(
    wanted: Sequence[tuple[list[Piece], tuple[int, ...]]], buckets: Sequence[TransferBucket], sources: int
) -> None:
    """Every piece of every destination rank is in exactly one bucket."""
    planned: dict[int, int] = defaultdict(int)
    for bucket in buckets:
        planned[bucket.destination - sources] += len(bucket.moves)
    for pieces, ranks in wanted:
        for rank in ranks:
            assert planned[rank] == len(pieces), f"destination {rank}: {planned[rank]} of {len(pieces)} pieces planned"


def _digest(buckets: Sequence[TransferBucket], sources: int, destinations: int) -> str:
    """Equal for equal plans, in every process."""
    digest = hashlib.sha256(f"{sources} {destinations}".encode())
    texts: dict[int, bytes] = {}  # moves are shared by the replicas of a destination
    for bucket in buckets:
        digest.update(f"{bucket.round} {bucket.source} {bucket.destination}".encode())
        for move in bucket.moves:
            text = texts.get(id(move))
            if text is None:
                text = texts[id(move)] = hashlib.md5(repr(move).encode(), usedforsecurity=False).digest()
            digest.update(text)
    return digest.hexdigest()[:16]
