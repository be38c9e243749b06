"""Refits between two processes on one GPU: the receiver maps the sender's live tensors and copies from them into its own.

There is no message and no staging memory. The sender lends its tensors (`Loans` of `channels/ipc_memory.py`) and waits until
they are read, so the GPU changes from one process to the other once, not for each bucket. To map and unmap 200 allocations
takes 25 ms, in which a GPU could copy 35 GB, so they stay mapped until the sender reclaims them. Senders that do not promise
to do so, and memory that cannot be mapped, are left to messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dagrl.channels.base import Channel, wait_all
from dagrl.channels.ipc import IpcChannel
from dagrl.refit.carry.pack import Addresses, Tensors, live_scales, live_views, moved_tensors, raw
from dagrl.refit.kernels.batched import BatchedCopy, Quantized
from dagrl.refit.slices import STACKED
from dagrl.refit.transfers import Move, MoveSide, RankPlan, TransferBucket


class MappedMoves:
    """The buckets of `plan` that a rank sends to, or receives from, ranks on its own GPU; none if the channel is not IPC.

    Without `lends` none is sent. Raises RefitPlanError if `tensors` do not fit the plan.
    """

    def __init__(self, plan: RankPlan, tensors: Tensors, channel: Channel, lends: bool) -> None:
        self._plan, self._tensors, self._channel = plan, tensors, channel
        self._ipc = channel if isinstance(channel, IpcChannel) else None
        self._sends = [bucket for bucket in plan.sends if bucket.mapped and self._ipc and lends]
        self._receives = [bucket for bucket in plan.receives if bucket.mapped and self._ipc]
        self._addresses, self._lends = Addresses({}, ()), lends
        self._done = torch.zeros(1, dtype=torch.int64)
        self.bind()

    def __bool__(self) -> bool:
        return bool(self._sends or self._receives)

    @property
    def rest(self) -> RankPlan:
        """The plan without these buckets."""
        ours = {id(bucket) for bucket in (*self._sends, *self._receives)}
        sends, receives = (
            tuple(bucket for bucket in some if id(bucket) not in ours) for some in (self._plan.sends, self._plan.receives)
        )
        return replace(self._plan, sends=sends, receives=receives)

    @property
    def moved(self) -> bool:
        """Whether a tensor has new memory, so that `bind` must be called."""
        return self._addresses.moved

    def bind(self) -> None:
        """Lends the tensors where they are now. A sender that cannot has no buckets any more."""
        self._addresses.forget()
        sides: list[tuple[list[TransferBucket], MoveSide]] = [(self._sends, "source"), (self._receives, "target")]
        for buckets, side in sides:
            for move in (move for bucket in buckets for move in bucket.moves):
                live_views(move, self._tensors, side)
                live_scales(move, self._tensors, side)
        self._addresses = Addresses(self._tensors, [name for some, side in sides for name in moved_tensors(some, side)])
        self._copies: dict[int, tuple[object, BatchedCopy]] = {}
        self.lent = 0
        """The number of the loan that this rank's receivers borrow; 0: nothing is lent."""
        if self._sends and self._ipc is not None:
            names = dict.fromkeys(moved_tensors(self._sends, "source"))
            self.lent = self._ipc.lend({name: self._tensors[name] for name in names})
            self._sends = self._sends if self.lent else []

    def reclaim(self) -> None:
        """Returns when no receiver maps the tensors. They are lent again even if new memory has the same addresses."""
        if self._lends and self._ipc is not None:
            self._addresses.forget()
            self._ipc.reclaim()

    def start(self) -> None:
        """Waits until what this rank has lent is written; receivers read it outside its stream."""
        if self._sends:
            self._channel.synchronize()

    def drop(self, peers: Sequence[int]) -> bool:
        """Leaves the buckets of these senders to messages. Returns whether there were any."""
        rest = [bucket for bucket in self._receives if bucket.source not in peers]
        dropped, self._receives = len(rest) < len(self._receives), rest
        return dropped

    def read(self, numbers: Mapping[int, int]) -> None:
        """Copies what each sender has lent under its number into this rank's tensors, on the current stream."""
        for peer in dict.fromkeys(bucket.source for bucket in self._receives):
            assert self._ipc is not None
            borrowed = self._ipc.borrow(peer, numbers[peer])
            where = (numbers[peer], borrowed.addresses)
            bound, copies = self._copies.get(peer, (None, None))
            if copies is None or bound != where:
                own = [bucket for bucket in self._receives if bucket.source == peer]
                copies = mapped_copy(own, borrowed.tensors, self._tensors)
                self._copies[peer] = where, copies
            copies.run(alone=True)

    def finish(self) -> None:
        """Returns when this rank's copies are complete, and nobody reads what it has lent."""
        if self._receives:
            self._channel.synchronize()
        senders = dict.fromkeys(bucket.source for bucket in self._receives)
        receivers = dict.fromkeys(bucket.destination for bucket in self._sends)
        sends, receives = ([(self._done, peer) for peer in some] for some in (senders, receivers))
        if self:
            wait_all(self._channel.exchange(sends, receives))


def mapped_copy(buckets: Sequence[TransferBucket], source: Tensors, target: Tensors) -> BatchedCopy:
    """Returns all copies from the tensors of one sender."""
    views = [_views(move, source, target) for bucket in buckets for move in bucket.moves]
    pairs = [pair for copied, _ in views for pair in copied]
    return BatchedCopy([to for to, _ in pairs], [of for _, of in pairs], [part for _, some in views for part in some])


def _views(move: Move, source: Tensors, target: Tensors) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[Quantized]]:
    """Returns the copies (to, of) of a move, and what is quantized: (weight, target of its FP8, target of its scales)."""
    stacked = STACKED in move.source or STACKED in move.target

    def one_by_one(views: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        return views if STACKED in name or not stacked else list(views[0])

    of = one_by_one(live_views(move, source, "source"), move.source)
    to = one_by_one(live_views(move, target, "target"), move.target)
    if move.scales is not None:
        scales = one_by_one(live_scales(move, target, "target"), move.scales.tensor)
        if move.source_scales is None:
            return [], list(zip(of, to, scales, strict=True))
        of += one_by_one(live_scales(move, source, "source"), move.source_scales.tensor)
        to += scales
    return [(raw(a), raw(b)) if a.dtype == b.dtype else (a, b) for a, b in zip(to, of, strict=True)], []
