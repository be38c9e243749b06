"""Replaying a refit plan over a channel: one side packs and sends, the other receives and unpacks.

Two buckets are in flight: while one travels, the next is packed and the one before is unpacked. Every pair of ranks first
exchanges a header, so that weights of another plan or version are refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagrl.channels.base import Channel, Pending
from dagrl.errors import ChannelError, RefitPlanError, RunError
from dagrl.refit.pack import BucketMemory, Side, bind_buckets
from dagrl.refit.plan import RankPlan, TransferBucket

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RefitReport:
    """What one rank, or several together, carried: `seconds` from the start to the last byte, the longest of them."""

    version: int
    bytes_sent: int
    bytes_received: int
    seconds: float


def merge_reports(parts: Sequence[RefitReport]) -> RefitReport:
    """One report of several ranks; associative. Raises RunError when they are not of one version."""
    versions = {part.version for part in parts}
    if len(versions) != 1:
        raise RunError(f"a refit reported the versions {sorted(versions)}; all workers of a refit must carry the same one")
    return RefitReport(
        versions.pop(),
        sum(part.bytes_sent for part in parts),
        sum(part.bytes_received for part in parts),
        max(part.seconds for part in parts),
    )


class RefitSender:
    """The source side of a refit on one rank.

    `tensors` are the live local tensors by the names in the plan; their memory must stay where it is. Raises RefitPlanError
    when channel, tensors or dtypes do not fit the plan.
    """

    def __init__(self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel) -> None:
        self._end = _End(plan, plan.sends, tensors, channel, "source")

    def send(self, version: int) -> RefitReport:
        """Send the weights as `version`; they may change again when this returns. Raises ChannelError."""
        start = time.perf_counter()
        end, channel = self._end, self._end.channel
        end.check_memory()
        headers = channel.exchange([(end.header(version), peer) for peer in end.peers], [])
        pending: list[Pending] = []
        for index, memory in enumerate(end.memories):
            if index >= 2:
                pending[index - 2].wait()
            memory.pack()
            pending.append(channel.send(memory.message, memory.bucket.destination))
        _wait_all([*headers, *pending[-2:]])
        channel.synchronize()
        return RefitReport(version, end.nbytes, 0, time.perf_counter() - start)


class RefitReceiver:
    """The destination side of a refit on one rank; see `RefitSender`."""

    def __init__(self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel) -> None:
        self._end = _End(plan, plan.receives, tensors, channel, "target")

    def receive(self, version: int) -> RefitReport:
        """Receive the weights of `version` into the live tensors.

        Raises ChannelError when the channel breaks or a sender has another plan or version: the weights may then be torn,
        and must not be used before a whole refit has succeeded.
        """
        start = time.perf_counter()
        end, channel = self._end, self._end.channel
        end.check_memory()
        self._check_headers(version)
        pending = [self._post(memory) for memory in end.memories[:2]]
        for index, memory in enumerate(end.memories):
            pending[index].wait()
            memory.unpack()
            if index + 2 < len(end.memories):
                pending.append(self._post(end.memories[index + 2]))
        channel.synchronize()
        return RefitReport(version, 0, end.nbytes, time.perf_counter() - start)

    def _post(self, memory: BucketMemory) -> Pending:
        return self._end.channel.receive(memory.message, memory.bucket.source)

    def _check_headers(self, version: int) -> None:
        """Before any byte moves: all senders follow the same plan and send the same version."""
        end = self._end
        template = end.header(version)
        headers = [template.new_empty(template.shape) for _ in end.peers]
        _wait_all(end.channel.exchange([], list(zip(headers, end.peers, strict=True))))
        end.channel.synchronize()  # reading a header waits for the device, which has no deadline of its own
        for header, peer in zip(headers, end.peers, strict=True):
            digest, sent = header.tolist()
            if digest != end.digest:
                raise ChannelError(f"rank {peer} sends by another refit plan; plan once and give every rank its part of it")
            if sent != version:
                raise ChannelError(f"rank {peer} sends version {sent}, but version {version} is being received")


class _End:
    """What both sides share: the plan, the memory it names, the channel."""

    def __init__(
        self,
        plan: RankPlan,
        buckets: Sequence[TransferBucket],
        tensors: Mapping[str, torch.Tensor],
        channel: Channel,
        side: Side,
    ) -> None:
        if (channel.spec.rank, channel.spec.size) != (plan.rank, plan.size):
            raise RefitPlanError(
                f"the plan is for rank {plan.rank} of {plan.size}, the channel is rank {channel.spec.rank} of "
                f"{channel.spec.size}; plan for the world that the channel joins"
            )
        self.channel, self.tensors = channel, tensors
        self.digest = int(plan.digest[:15], 16)  # as an int64
        self.memories = bind_buckets(buckets, tensors, side)
        ends = [bucket.destination if side == "source" else bucket.source for bucket in buckets]
        self.peers = list(dict.fromkeys(ends))
        self.nbytes = sum(bucket.nbytes for bucket in buckets)
        self._named = {getattr(move, side) for bucket in buckets for move in bucket.moves}
        self._addresses = {name: tensors[name].data_ptr() for name in self._named}

    def header(self, version: int) -> torch.Tensor:
        """`[2]` int64: the plan's digest and the version."""
        import torch

        device = self.memories[0].live[0].device if self.memories else "cpu"
        return torch.tensor([self.digest, version], dtype=torch.int64, device=device)

    def check_memory(self) -> None:
        """The tensors are still where they were; otherwise the bound views write to dead memory."""
        for name, address in self._addresses.items():
            if self.tensors[name].data_ptr() != address:
                raise RunError(f"tensor {name!r} was given new memory after the refit was prepared; prepare it again")


def _wait_all(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()
