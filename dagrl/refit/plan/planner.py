"""Plans a refit: which rank sends which box to whom, in which bucket and round. A plan is made once and replayed.

Planning intersects the boxes of both sides, chooses one source for each part among the ranks that hold it, fills buckets,
and orders them in rounds in which each rank sends to at most one rank and receives from at most one. Ranks here are channel
ranks: the sources, then the destinations.

    plan = plan_refit(train_slices, generation_slices, dtype="bfloat16")
    print(plan.summary())
    mine = plan.for_rank(channel_rank)      # picklable; all that one worker needs
"""

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagrl.channels.base import MAILBOX_SLOTS
from dagrl.errors import RefitPlanError
from dagrl.imports import gc_paused
from dagrl.refit.fp8 import FP8
from dagrl.refit.plan.buckets import BucketContents, BucketFiller, BucketLimits, MessageBuilder, PartBytes
from dagrl.refit.plan.coverage import (
    PlacedPart,
    SlicesOfRanks,
    SourceIndex,
    SourcePart,
    check_parameters,
    cover,
    distinct_lists,
    index_sources,
    prove_covered,
    source_name,
    without_mixed_stacks,
)
from dagrl.refit.plan.ordering import BucketPosition, message_s, order_rounds
from dagrl.refit.plan.routes import PartGroup, Placement, RankPair, choose_routes, group_parts
from dagrl.refit.plan.summary import RELAYING_BUCKETS, PlanSummary
from dagrl.refit.slices import Box, WeightSlice, volume
from dagrl.refit.transfers import ALIGNMENT, DIRECT_BYTES, ITEM_BYTES, RankPlan, TransferBucket, Verify, aligned, move_bytes

BUCKET_BYTES = (64 << 20, 256 << 20)
"""Smallest and largest default bucket. NCCL uses all its channels only for messages above 128 MB, which are faster."""
PAIR_BUCKET_BYTES = 512 << 20
"""Largest default bucket if one rank sends to one other in its host; each end stages at most `BUCKET_BYTES` of it.

Starting a round takes as long as sending 10 MB over NVLink. Only between two ranks a bucket is a group of messages. Between
more ranks NCCL uses half of its channels for messages under 256 MB, also in groups: 4B from TP2 to TP2 then took 16.2 ms
instead of 12.4 on four H200."""
NEVER_DIRECT = sys.maxsize
STAGING_BUCKETS = 2
"""No rank stages more than this many of the largest buckets, except for the mailboxes of an IPC channel.

A rank that only sends, or only receives, has two buckets in flight. One that relays packs a third, so that buckets must be
smaller in plans with relays."""
MAILBOXES_BYTES = 1 << 30
"""Most memory for the mailboxes of a sender.

If processes share a GPU, each bucket costs two switches between them: 0.3 ms, in which 600 MB could be copied. Each GiB of
mailboxes, which every refit allocates and frees, costs 7 ms. Buckets are therefore as large as this and `BUCKET_BYTES`
allow. 4B on one H200, with its pause: 175 ms in buckets of 16 MB, 27 ms of 256 MB, 28 ms of 512 MB."""
GROUPS = 4
"""A bucket's staging is split into at least this many groups if buckets may be larger than it, so that they fill up."""
BUCKETS = 8
"""A destination's bytes are split into at least this many buckets, so that packing and unpacking overlap with messages."""

TIED_HEAD = {"lm_head.weight": "model.embed_tokens.weight"}
"""Alias for models with tied embeddings: fills a destination's own head from the embedding."""

CASTABLE = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False, slots=True)
class PlannedBucket:
    """Part groups that are sent from `source` to `destination` in round `round`, `nbytes` in all.

    The source packs `packed` bytes and the destination unpacks `unpacked`: what is not contiguous there.
    """

    round: int
    source: int
    destination: int
    groups: tuple[PartGroup, ...]
    nbytes: int
    packed: int
    unpacked: int


@dataclass(frozen=True, eq=False)
class RefitPlan:
    """The plan of all ranks. `sources` and `destinations` count the ranks of each side; `buckets` are in round order.

    `mailboxes`: the channel's senders have mailboxes, which count as staging memory. `devices`: the GPU of each rank, if
    some share one.
    """

    sources: int
    destinations: int
    digest: str
    buckets: tuple[PlannedBucket, ...]
    hosts: tuple[int, ...]
    mailboxes: bool
    devices: tuple[str, ...]
    _moves: MessageBuilder = field(repr=False)
    _of_rank: dict[int, list[PlannedBucket]] = field(repr=False, default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            self._of_rank[bucket.source].append(bucket)
            self._of_rank[bucket.destination].append(bucket)

    @property
    def size(self) -> int:
        """Number of channel ranks."""
        return self.sources + self.destinations

    def for_rank(self, rank: int, verify: Verify = "off") -> RankPlan:
        """Returns the part of channel rank `rank`, and makes its moves. All ranks need the same `verify`."""
        if not 0 <= rank < self.size:
            raise RefitPlanError(f"the rank is {rank}; expected 0 to {self.size - 1} in a refit of {self.size} ranks")
        buckets: list[TransferBucket] = []
        for bucket in self._of_rank.get(rank, ()):
            source, to = bucket.source, bucket.destination
            messages = self._moves.messages(source, to, bucket.groups)
            mapped = verify == "off" and bool(self.devices) and "" != self.devices[source] == self.devices[to]
            buckets.append(TransferBucket(bucket.round, source, to, messages, source >= self.sources, mapped))
        sends = tuple(bucket for bucket in buckets if bucket.source == rank)
        receives = tuple(bucket for bucket in buckets if bucket.destination == rank)
        return RankPlan(rank, self.size, self.digest, sends, receives, verify)

    def summary(self) -> PlanSummary:
        """Returns bytes per pair and link, balance, staging memory and duration."""
        messages = tuple((bucket.round, bucket.source, bucket.destination, bucket.nbytes) for bucket in self.buckets)
        copied = tuple((bucket.packed, bucket.unpacked) for bucket in self.buckets)
        return PlanSummary(messages, copied, self.sources, self.destinations, self.hosts, self.mailboxes)


def plan_refit(
    sources: Sequence[Sequence[WeightSlice]],
    destinations: Sequence[Sequence[WeightSlice]],
    *,
    dtype: str,
    target_dtype: str | None = None,
    aliases: Mapping[str, str] | None = None,
    bucket_bytes: int | None = None,
    hosts: Sequence[int] | None = None,
    direct_bytes: int | None = None,
    mailboxes: bool = False,
    devices: Sequence[str] = (),
) -> RefitPlan:
    """Plans the transfer of every box that `destinations[i]` describes from the ranks `sources[j]` that hold it.

    - `dtype`: of source tensors whose slices give none, such as `bfloat16`. `target_dtype`: the same for destinations
      (None: equal to `dtype`). What must be cast is staged.
    - `aliases`: maps a destination's parameter to the source parameter that fills it if the sources lack it (`TIED_HEAD`).
    - `bucket_bytes`: most bytes of a bucket (None: chosen by the bytes of a destination).
    - `hosts`: the host of each channel rank (None: all on one). Sources on the destination's host are preferred. From
      another host a byte is sent once, to one rank that wants it, which relays it to the others.
    - `direct_bytes`: contiguous runs of at least this size are sent directly between tensors, as messages of their own
      (None: `DIRECT_BYTES` between two ranks in a host and with `mailboxes`, otherwise only what fills a bucket alone).
    - `mailboxes`: the channel sends messages through memory of the sender (`channels/ipc.py`). `devices`: then the UUID of
      each rank's GPU; ranks on one GPU need no messages between them.

    Raises RefitPlanError that names the parameter if only one side has it, its shapes differ, no source holds some part of
    it, an element would be written twice, its dtype cannot be cast, or an FP8 block would be split.
    """
    size = len(sources) + len(destinations)
    placement = Placement(tuple(hosts or [0] * size))
    if len(placement.hosts) != size:
        raise RefitPlanError(f"got {len(placement.hosts)} hosts for a refit of {size} ranks; give one per rank")
    held, wanted = without_mixed_stacks(distinct_lists(sources), distinct_lists(destinations))
    index = index_sources(held)
    check_parameters(index, wanted, aliases or {})
    most = max((sum(volume(weight.box) for weight in slices) for slices, _ in wanted), default=0) * _item_bytes(dtype)
    pair = size == 2 and len(set(placement.hosts)) == 1
    mailboxed = len(destinations) if mailboxes else 0
    limits = _limits(most, pair, mailboxed, bucket_bytes, direct_bytes, placement.may_relay(len(sources)))
    dtypes = (dtype, target_dtype or dtype)
    # Planning creates millions of objects and no cyclic garbage; collections would take a third of the time.
    with gc_paused():
        planner = _Planner(index, held, wanted, len(sources), dtypes, aliases or {}, limits, placement)
        buckets = planner.buckets()
    digest = _digest(held, wanted, buckets, (dtype, aliases, limits))
    return RefitPlan(
        len(sources), len(destinations), digest, buckets, placement.hosts, mailboxes, tuple(devices), planner.moves
    )


def _limits(
    most: int, pair: bool, mailboxed: int, bucket_bytes: int | None, direct_bytes: int | None, relays: bool
) -> BucketLimits:
    """Returns the limits asked for, or those for destinations that want at most `most` bytes.

    `pair`: one rank sends to one other in its host. `mailboxed`: number of destinations that a sender has mailboxes for.
    `relays`: a rank may stage `RELAYING_BUCKETS` at once.
    """
    if mailboxed:
        largest = min(BUCKET_BYTES[1], MAILBOXES_BYTES // (MAILBOX_SLOTS * mailboxed))
    else:
        largest = min(max(BUCKET_BYTES[0], most // BUCKETS), PAIR_BUCKET_BYTES if pair else BUCKET_BYTES[1])
    bucket = bucket_bytes or largest
    staged = bucket_bytes or min(bucket, BUCKET_BYTES[1])
    if direct_bytes is None:
        direct_bytes = DIRECT_BYTES if pair or mailboxed else NEVER_DIRECT
    if relays:
        least = staged * STAGING_BUCKETS // RELAYING_BUCKETS
        bucket = staged = least // ALIGNMENT * ALIGNMENT or least
    return BucketLimits(bucket, staged, direct_bytes)


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
        limits: BucketLimits,
        placement: Placement,
    ) -> None:
        self._index, self._sources, self._dtype = index, sources, dtypes[0]
        self._aliases, self._limits, self._placement = aliases, limits, placement
        self._ranks_of = [tuple(sources + rank for rank in ranks) for _, ranks in wanted]
        self._list_of = {rank: number for number, ranks in enumerate(self._ranks_of) for rank in ranks}
        self._covers: dict[tuple[str, Box, bool], list[SourcePart]] = {}
        self._nbytes: dict[SourcePart, PartBytes] = {}
        names = {weight.name for slices, _ in wanted for weight in slices}
        self._places = Counter(source_name(name, index, aliases) for name in names)  # how often each parameter is wanted
        self._placed_parts = [self._placed_parts_of(slices) for slices, _ in wanted]
        self.moves = MessageBuilder(held, wanted, self._placed_parts, sources, dtypes, limits.direct)
        several = self._places.total() > len(self._places)
        self._filling = BucketFiller(
            index, self._list_of, self._placed_parts, self._nbytes, self.moves, limits, in_several_places=several
        )

    def _placed_parts_of(self, slices: Sequence[WeightSlice]) -> dict[SourcePart, list[PlacedPart]]:
        """Returns the placed parts of one destination slice list, by part, after proving their coverage."""
        placed_parts: dict[SourcePart, list[PlacedPart]] = defaultdict(list)
        for target in slices:
            for part in self._parts_of(target):
                placed_parts[part].append(PlacedPart(part, target))
        prove_covered(slices, [placed_part for some in placed_parts.values() for placed_part in some])
        return dict(placed_parts)

    def _parts_of(self, target: WeightSlice) -> list[SourcePart]:
        """Returns the parts of a slice; destinations that want the same box share them."""
        name = source_name(target.name, self._index, self._aliases)
        key = (name, target.box, target.scales is not None)
        parts = self._covers.get(key)
        if parts is None:
            source = next(iter(next(iter(self._index[name].values())).slices.values()))
            wire = _check_dtypes(source, target, self._dtype)
            limit = self._limits.staged - (self._limits.staged // 2048 if target.scales else 0)  # room for the scales
            elements = limit // (self._places[name] * ITEM_BYTES[wire])
            parts = self._covers[key] = cover(target, self._index, name, max(1, elements))
            for part in parts:
                exact = move_bytes(part.box, wire, target.scales is not None)
                self._nbytes[part] = PartBytes(exact, aligned(exact))
        return parts

    def buckets(self) -> tuple[PlannedBucket, ...]:
        """Returns the buckets of all pairs, in the order of rounds."""
        lists: dict[SourcePart, list[int]] = defaultdict(list)
        for number, placed_parts in enumerate(self._placed_parts):
            for part in placed_parts:
                lists[part].append(number)
        keys: dict[tuple[int, ...], tuple[int, ...]] = {}
        wanted_by = {part: keys.setdefault(key, key) for part, numbers in lists.items() for key in (tuple(numbers),)}
        replicas = {key: sum(len(self._ranks_of[number]) for number in key) for key in keys}
        most = self._limits.staged if self._limits.staged == self._limits.bucket else self._limits.staged // GROUPS
        nbytes = {part: size.aligned * self._places[part.name] for part, size in self._nbytes.items()}
        groups = group_parts(wanted_by, nbytes, replicas, most)
        direct, relays = choose_routes(groups, self._ranks_of, self._sources, self._limits.staged, self._placement)
        filled = {pair: self._filling.fill(pair, chosen) for pair, chosen in sorted(direct.items())}
        relayed, after = self._relays(filled, relays)
        filled |= relayed
        durations: dict[RankPair, list[int]] = {}  # in nanoseconds
        for pair, contents in filled.items():
            crosses = self._placement.crosses(*pair)
            durations[pair] = [1 + round(1e9 * message_s(nbytes, crosses)) for _, nbytes, *_ in contents]
        ordered = tuple(
            PlannedBucket(number, source, to, *filled[source, to][position])
            for number, source, to, position in order_rounds(durations, after)
        )
        self._check_complete(ordered)
        return ordered

    def _relays(
        self, filled: Mapping[RankPair, Sequence[BucketContents]], relays: Mapping[RankPair, Sequence[PartGroup]]
    ) -> tuple[dict[RankPair, list[BucketContents]], dict[BucketPosition, BucketPosition]]:
        """Returns the buckets that leaders relay on their hosts, and for each the bucket that must arrive before it."""
        followers: dict[int, dict[int, set[int]]] = defaultdict(dict)
        for (leader, rank), groups in relays.items():
            followers[leader][rank] = {id(group) for group in groups}
        out: dict[RankPair, list[BucketContents]] = defaultdict(list)
        after: dict[BucketPosition, BucketPosition] = {}
        for (source, leader), buckets in filled.items():
            for position, (groups, *_) in enumerate(buckets):
                for rank, wants in followers.get(leader, {}).items():
                    some = [group for group in groups if id(group) in wants]
                    if some:
                        after[leader, rank, len(out[leader, rank])] = (source, leader, position)
                        out[leader, rank].append(self._filling.contents((leader, rank), tuple(some)))
        return dict(out), after

    def _check_complete(self, buckets: Sequence[PlannedBucket]) -> None:
        """Asserts that each part that a destination wants is in exactly one of its buckets."""
        planned: dict[int, list[SourcePart]] = defaultdict(list)
        for bucket in buckets:
            planned[bucket.destination] += [part for group in bucket.groups for part in group.parts]
        for number, ranks in enumerate(self._ranks_of):
            wanted = self._placed_parts[number].keys()
            for rank in ranks:
                parts = planned[rank]
                assert len(parts) == len(wanted) and set(parts) == wanted, (
                    f"rank {rank}: some part is not planned exactly once"
                )


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise RefitPlanError(f"a refit cannot send dtype {dtype!r}; choose one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _check_dtypes(source: WeightSlice, target: WeightSlice, dtype: str) -> str:
    """Returns the dtype on the wire. Raises RefitPlanError if the destination's dtype cannot be made from it."""
    sent = source.dtype or dtype
    _item_bytes(sent)
    wanted = target.dtype or sent
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
    """Returns a digest that is equal for equal plans, in every process."""
    digest = hashlib.sha256(repr(options).encode())
    for slices, ranks in (*held, *wanted):
        digest.update(repr(ranks).encode())
        for weight in slices:
            digest.update(
                f"{weight.name} {weight.box} {weight.tensor} {weight.local} {weight.dtype} {weight.scales}".encode()
            )
    for bucket in buckets:
        digest.update(f"{bucket.round} {bucket.source} {bucket.destination} {bucket.nbytes}".encode())
    return digest.hexdigest()[:16]
