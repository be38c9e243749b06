"""The plan of a refit: who sends which box to whom, in which bucket and in which order; made once, replayed for ever.

Boxes of both sides are intersected, one source is chosen for each part among the ranks that hold it, parts are packed into
buckets, and buckets are ordered in rounds in which no rank hears from two senders and none serves two receivers. Ranks here
are channel ranks: sources come first, then destinations.

    plan = plan_refit(train_slices, generation_slices, dtype="bfloat16")
    print(plan.summary())
    mine = plan.for_rank(channel_rank)      # picklable; all that one worker needs
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagrl.channels.base import MAILBOX_SLOTS
from dagrl.errors import RefitPlanError
from dagrl.garbage import no_collections
from dagrl.refit.block_moves import BlockMoves
from dagrl.refit.cover import (
    Part,
    Piece,
    SlicesOfRanks,
    SourceIndex,
    check_parameters,
    cover,
    distinct_lists,
    index_sources,
    prove_covered,
    source_name,
)
from dagrl.refit.fill import BucketFilling, Contents, Limits, PartBytes
from dagrl.refit.moves import DIRECT_BYTES, ITEM_BYTES, RankPlan, TransferBucket, aligned, move_bytes
from dagrl.refit.order import Position, order_rounds
from dagrl.refit.quantize import FP8
from dagrl.refit.schedule import Block, LinkSpeeds, Pair, Placement, choose_routes, make_blocks
from dagrl.refit.slices import Box, WeightSlice, volume
from dagrl.refit.summary import PlanSummary

BUCKET_BYTES = (64 << 20, 256 << 20)
"""Smallest and largest default bucket. NCCL gives a message all its channels only above 128 MB: large ones travel faster."""
PAIR_BUCKET_BYTES = 512 << 20
"""Largest default bucket between one rank and another in a host, of which no end stages more than `BUCKET_BYTES`: a round's
beginning takes as long as 10 MB over NVLink. Only there is a bucket a group of messages: among more ranks NCCL gives those
under 256 MB half of its channels, in groups too (4B from TP2 to TP2 took 16.2 ms so in place of 12.4, four H200)."""
NEVER_DIRECT = sys.maxsize
MAILBOXES_BYTES = 1 << 30
"""What the mailboxes of a sender may take. Where processes share a GPU, each bucket costs two changes between them, 0.3 ms,
in which 600 MB could be copied, and each GiB of mailboxes, which come and go with every refit, 7 ms: there buckets are as
large as this and `BUCKET_BYTES` allow (4B on one H200: with its pause 175 ms in buckets of 16 MB, 27 of 256, 28 of 512)."""
BLOCKS = 4
"""Into how many blocks what an end may stage of a bucket is cut at least where buckets may be larger, to fill them."""
BUCKETS = 8
"""Into how many buckets a destination's bytes are cut at least, so that packing and unpacking overlap with messages."""

TIED_HEAD = {"lm_head.weight": "model.embed_tokens.weight"}
"""Alias for models with tied embeddings: a destination that keeps a head of its own gets the embedding."""

CASTABLE = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False, slots=True)
class PlannedBucket:
    """Blocks that go from `source` to `destination` as one group of messages, `nbytes` in all, in round `round`.

    The source packs `packed` bytes of them and the destination unpacks `unpacked`: what is in several pieces there.
    """

    round: int
    source: int
    destination: int
    blocks: tuple[Block, ...]
    nbytes: int
    packed: int
    unpacked: int


@dataclass(frozen=True, eq=False)
class RefitPlan:
    """A whole refit. `sources` and `destinations` count the ranks of each side; `buckets` are in the order of rounds.

    `mailboxes`: over a channel whose senders have some, which count as staging.
    """

    sources: int
    destinations: int
    digest: str
    buckets: tuple[PlannedBucket, ...]
    hosts: tuple[int, ...]
    mailboxes: bool
    _moves: BlockMoves = field(repr=False)
    _of_rank: dict[int, list[PlannedBucket]] = field(repr=False, default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            self._of_rank[bucket.source].append(bucket)
            self._of_rank[bucket.destination].append(bucket)

    @property
    def size(self) -> int:
        """Ranks of the channel."""
        return self.sources + self.destinations

    def for_rank(self, rank: int) -> RankPlan:
        """The part of channel rank `rank`; only now its moves are made."""
        if not 0 <= rank < self.size:
            raise RefitPlanError(f"rank {rank} is outside a refit of {self.size} ranks")
        mine = [self._transfer(bucket) for bucket in self._of_rank.get(rank, ())]
        sends = tuple(bucket for bucket in mine if bucket.source == rank)
        receives = tuple(bucket for bucket in mine if bucket.destination == rank)
        return RankPlan(rank, self.size, self.digest, sends, receives)

    def summary(self) -> PlanSummary:
        """Bytes per pair and link, balance, staging memory, time."""
        messages = tuple((bucket.round, bucket.source, bucket.destination, bucket.nbytes) for bucket in self.buckets)
        copied = tuple((bucket.packed, bucket.unpacked) for bucket in self.buckets)
        return PlanSummary(messages, copied, self.sources, self.destinations, self.hosts, self.mailboxes)

    def _transfer(self, bucket: PlannedBucket) -> TransferBucket:
        relay = bucket.source >= self.sources
        messages = self._moves.messages(bucket.source, bucket.destination, bucket.blocks)
        return TransferBucket(bucket.round, bucket.source, bucket.destination, messages, relay)


def plan_refit(
    sources: Sequence[Sequence[WeightSlice]],
    destinations: Sequence[Sequence[WeightSlice]],
    *,
    dtype: str,
    target_dtype: str | None = None,
    aliases: Mapping[str, str] | None = None,
    bucket_bytes: int | None = None,
    hosts: Sequence[int] | None = None,
    replicate_in_host: bool = True,
    speeds: LinkSpeeds | None = None,
    direct_bytes: int | None = None,
    mailboxes: bool = False,
) -> RefitPlan:
    """Plan the transfer of every box that `destinations[i]` describe from the ranks `sources[j]` that hold it.

    `dtype` is that of source tensors whose slices name none (`float32`, `bfloat16`, ...), `target_dtype` that of such
    destinations (None: the same); what has to be cast is staged. `aliases` maps a destination's parameter to the one that
    feeds it where the sources lack its own name (`TIED_HEAD`). `hosts` has the host of each channel rank (None: all on one);
    then sources on the same host are preferred, and with `replicate_in_host` a byte goes to each other host once, to one of
    the ranks there that want it, which passes it on to the rest. `speeds` are what messages are ordered for. What lies in
    one piece and has at least `direct_bytes` is a message of its own, straight from and into tensors (None: `DIRECT_BYTES`
    between two ranks in a host and with `mailboxes`, else only what fills a bucket alone). `mailboxes`: the plan is for a
    channel whose messages pass through memory of the sender's (`channels/ipc.py`).

    Raises RefitPlanError naming the parameter when only one side has it, when shapes differ, when a part of it is held by
    no source, when an element would be written twice, when dtypes cannot be cast, or when FP8 blocks would be cut.
    """
    if hosts is not None and len(hosts) != len(sources) + len(destinations):
        raise RefitPlanError(
            f"{len(hosts)} hosts were given for a refit of {len(sources) + len(destinations)} ranks; one each"
        )
    held, wanted = distinct_lists(sources), distinct_lists(destinations)
    index = index_sources(held)
    check_parameters(index, wanted, aliases or {})
    most = max((sum(volume(one.box) for one in slices) for slices, _ in wanted), default=0) * _item_bytes(dtype)
    pair = len(sources) + len(destinations) == 2 and (hosts is None or len(set(hosts)) == 1)
    mailboxed = len(destinations) if mailboxes else 0
    limits = _limits(most, pair, mailboxed, bucket_bytes, direct_bytes)
    placement = None if hosts is None else Placement(tuple(hosts), replicate_in_host)
    dtypes, speeds = (dtype, target_dtype or dtype), speeds or LinkSpeeds()
    # Planning leaves no garbage in circles, and looking for it among its millions of objects takes a third of the time.
    with no_collections():
        planner = _Planner(index, held, wanted, len(sources), dtypes, aliases or {}, limits, placement, speeds)
        buckets = planner.buckets()
    digest = _digest(held, wanted, buckets, (dtype, aliases, limits, replicate_in_host))
    return RefitPlan(len(sources), len(destinations), digest, buckets, tuple(hosts or ()), mailboxes, planner.moves)


def _limits(most: int, pair: bool, mailboxed: int, bucket_bytes: int | None, direct_bytes: int | None) -> Limits:
    """As asked for, or by the `most` bytes that a destination wants. `pair`: one rank sends to another in its host;
    `mailboxed`: for how many destinations a sender may have mailboxes."""
    if mailboxed:
        largest = min(BUCKET_BYTES[1], MAILBOXES_BYTES // (MAILBOX_SLOTS * mailboxed))
    else:
        largest = min(max(BUCKET_BYTES[0], most // BUCKETS), PAIR_BUCKET_BYTES if pair else BUCKET_BYTES[1])
    bucket = bucket_bytes or largest
    staged = bucket_bytes or min(bucket, BUCKET_BYTES[1])
    if direct_bytes is None:
        direct_bytes = DIRECT_BYTES if pair or mailboxed else NEVER_DIRECT
    return Limits(bucket, staged, direct_bytes)


class _Planner:
    """The steps of `plan_refit`."""

    def __init__(
        self,
        index: SourceIndex,
        held: SlicesOfRanks,
        wanted: SlicesOfRanks,
        sources: int,
        dtypes: tuple[str, str],
        aliases: Mapping[str, str],
        limits: Limits,
        placement: Placement | None,
        speeds: LinkSpeeds,
    ) -> None:
        self._index, self._sources, self._dtype = index, sources, dtypes[0]
        self._aliases, self._limits, self._placement, self._speeds = aliases, limits, placement, speeds
        self._ranks_of = [tuple(sources + rank for rank in ranks) for _, ranks in wanted]
        self._description = {rank: number for number, ranks in enumerate(self._ranks_of) for rank in ranks}
        self._covers: dict[tuple[str, Box, bool], list[Part]] = {}
        self._nbytes: dict[Part, PartBytes] = {}
        names = {one.name for slices, _ in wanted for one in slices}
        self._places = Counter(source_name(name, index, aliases) for name in names)  # of each parameter's parts
        self._pieces = [self._pieces_of(slices) for slices, _ in wanted]
        self.moves = BlockMoves(held, wanted, self._pieces, sources, dtypes, limits.direct)
        several = self._places.total() > len(self._places)
        self._filling = BucketFilling(
            index, self._description, self._pieces, self._nbytes, self.moves, limits, in_several_places=several
        )

    def _pieces_of(self, slices: Sequence[WeightSlice]) -> dict[Part, list[Piece]]:
        """The proved pieces of one destination description, by part."""
        pieces: dict[Part, list[Piece]] = defaultdict(list)
        for held in slices:
            for part in self._parts_of(held):
                pieces[part].append(Piece(part, held))
        prove_covered(slices, [piece for some in pieces.values() for piece in some])
        return dict(pieces)

    def _parts_of(self, held: WeightSlice) -> list[Part]:
        """The parts that make up a slice; destinations that want the same box share them."""
        name = source_name(held.name, self._index, self._aliases)
        key = (name, held.box, held.scales is not None)
        parts = self._covers.get(key)
        if parts is None:
            source = next(iter(next(iter(self._index[name].values())).slices.values()))
            wire = _check_dtypes(source, held, self._dtype)
            limit = self._limits.staged - (self._limits.staged // 2048 if held.scales else 0)  # room for the scales
            elements = limit // (self._places[name] * ITEM_BYTES[wire])
            parts = self._covers[key] = cover(held, self._index, name, max(1, elements))
            for part in parts:
                exact = move_bytes(part.box, wire, held.scales is not None)
                self._nbytes[part] = PartBytes(exact, aligned(exact))
        return parts

    def buckets(self) -> tuple[PlannedBucket, ...]:
        """Buckets of all pairs, in rounds."""
        lists: dict[Part, list[int]] = defaultdict(list)
        for number, pieces in enumerate(self._pieces):
            for part in pieces:
                lists[part].append(number)
        keys: dict[tuple[int, ...], tuple[int, ...]] = {}
        wanted_by = {part: keys.setdefault(key, key) for part, numbers in lists.items() for key in (tuple(numbers),)}
        replicas = {key: sum(len(self._ranks_of[number]) for number in key) for key in keys}
        most = self._limits.staged if self._limits.staged == self._limits.bucket else self._limits.staged // BLOCKS
        nbytes = {part: one.aligned * self._places[part.name] for part, one in self._nbytes.items()}
        blocks = make_blocks(wanted_by, nbytes, replicas, most)
        routes = choose_routes(blocks, self._ranks_of, self._sources, self._limits.staged, self._placement)
        filled = {pair: self._filling.fill(pair, chosen) for pair, chosen in sorted(routes.direct.items())}
        relayed, after = self._relays(filled, routes.relays)
        filled |= relayed
        durations = {pair: [self._nanoseconds(pair, nbytes) for _, nbytes, *_ in some] for pair, some in filled.items()}
        ordered = tuple(
            PlannedBucket(number, source, to, *filled[source, to][position])
            for number, source, to, position in order_rounds(durations, after)
        )
        self._check_complete(ordered)
        return ordered

    def _nanoseconds(self, pair: Pair, nbytes: int) -> int:
        crosses = self._placement is not None and self._placement.crosses(*pair)
        return 1 + round(1e9 * self._speeds.seconds(nbytes, crosses))

    def _relays(
        self, filled: Mapping[Pair, Sequence[Contents]], relays: Mapping[Pair, Sequence[Block]]
    ) -> tuple[dict[Pair, list[Contents]], dict[Position, Position]]:
        """For each bucket that a leader gets, one of what others on its host want of it; and which waits for which."""
        followers: dict[int, dict[int, set[int]]] = defaultdict(dict)
        for (leader, rank), blocks in relays.items():
            followers[leader][rank] = {id(block) for block in blocks}
        out: dict[Pair, list[Contents]] = defaultdict(list)
        after: dict[Position, Position] = {}
        for (source, leader), buckets in filled.items():
            for position, (blocks, *_) in enumerate(buckets):
                for rank, wants in followers.get(leader, {}).items():
                    some = [block for block in blocks if id(block) in wants]
                    if some:
                        after[leader, rank, len(out[leader, rank])] = (source, leader, position)
                        out[leader, rank].append(self._filling.contents((leader, rank), tuple(some)))
        return dict(out), after

    def _check_complete(self, buckets: Sequence[PlannedBucket]) -> None:
        """Every part that a destination wants is in exactly one of its buckets."""
        planned: dict[int, list[Part]] = defaultdict(list)
        for bucket in buckets:
            planned[bucket.destination] += [part for block in bucket.blocks for part in block.parts]
        for number, ranks in enumerate(self._ranks_of):
            wanted = self._pieces[number].keys()
            for rank in ranks:
                found = planned[rank]
                assert len(found) == len(wanted) and set(found) == wanted, f"rank {rank}: not each part is planned once"


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise RefitPlanError(f"dtype {dtype!r} cannot be sent in a refit; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _check_dtypes(source: WeightSlice, target: WeightSlice, dtype: str) -> str:
    """The dtype on the wire. Raises RefitPlanError for one that the destination's cannot be made from."""
    sent = source.dtype or dtype
    _item_bytes(sent)
    wanted = target.dtype or sent
    if source.scales is not None:
        raise RefitPlanError(
            f"parameter {source.name!r} is quantized in the sources (tensor {source.tensor!r} has scales), which a refit "
            f"cannot send; train in {', '.join(CASTABLE[1:])}: it is quantized on its way where a destination has scales"
        )
    if target.scales is not None and wanted == FP8 and sent in CASTABLE:
        return FP8
    if (sent != wanted and not (sent in CASTABLE and wanted in CASTABLE)) or (target.scales is not None):
        hint = " without scales" if FP8 in (sent, wanted) and target.scales is None else ""
        raise RefitPlanError(
            f"parameter {target.name!r} is {sent} in the sources and cannot become {wanted}{hint} in tensor "
            f"{target.tensor!r}; {', '.join(CASTABLE)} are cast into each other, and into FP8 that has scales"
        )
    return sent


def _digest(held: SlicesOfRanks, wanted: SlicesOfRanks, buckets: Sequence[PlannedBucket], options: object) -> str:
    """Equal for equal plans, in every process."""
    digest = hashlib.sha256(repr(options).encode())
    for slices, ranks in (*held, *wanted):
        digest.update(repr(ranks).encode())
        for one in slices:
            digest.update(f"{one.name} {one.box} {one.tensor} {one.local} {one.dtype} {one.scales}".encode())
    for bucket in buckets:
        digest.update(f"{bucket.round} {bucket.source} {bucket.destination} {bucket.nbytes}".encode())
    return digest.hexdigest()[:16]
