"""Replaying a refit plan over a channel: one side packs and sends, the other receives, unpacks and passes on.

Two buckets are in flight: while one travels, the next is packed and the one before is unpacked. Every pair of ranks first
exchanges a header, so that weights of another plan, version or way of verifying are refused. What one rank sends and
receives in one round is posted together, in the order of rounds, so that ranks which do both never wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagrl.channels.base import Channel, Pending
from dagrl.errors import ChannelError, RefitPlanError, RunError
from dagrl.refit.moves import RankPlan
from dagrl.refit.pack import BucketMemory, Side, bind_staging, moved_tensors
from dagrl.refit.verify import Verify, check_mode, checksums, compare_checksums, differs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RefitReport:
    """What one rank, or several together, carried: `seconds` from the start to the last byte, the longest of them.

    `verify_seconds` is the part of them that the proof took.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    verify_seconds: float = 0.0


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
        max(part.verify_seconds for part in parts),
    )


class RefitSender:
    """The source side of a refit on one rank.

    `tensors` are the live local tensors by the names in the plan; their memory must stay where it is. `verify` must be the
    same on all ranks. Raises RefitPlanError when channel, tensors or dtypes do not fit the plan.
    """

    def __init__(
        self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel, verify: Verify = "off"
    ) -> None:
        self._end = _End(plan, tensors, channel, "source", verify)

    def send(self, version: int) -> RefitReport:
        """Send the weights as `version`; they may change again when this returns. Raises ChannelError."""
        return self._end.run(version)


class RefitReceiver:
    """The destination side of a refit on one rank; see `RefitSender`."""

    def __init__(
        self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel, verify: Verify = "off"
    ) -> None:
        self._end = _End(plan, tensors, channel, "target", verify)

    def receive(self, version: int) -> RefitReport:
        """Receive the weights of `version` into the live tensors.

        Raises ChannelError when the channel breaks or a sender has another plan or version, RunError when what is held in
        the end is not what was sent: the weights may then be torn, and must not be used before a whole refit has succeeded.
        """
        return self._end.run(version)


@dataclass
class _Round:
    """What one rank does in one round: at most one message each way."""

    send: BucketMemory | None = None
    receive: BucketMemory | None = None


class _End:
    """One rank of a refit: the plan, the memory that it names, the channel."""

    def __init__(
        self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel, side: Side, verify: Verify
    ) -> None:
        if (channel.spec.rank, channel.spec.size) != (plan.rank, plan.size):
            raise RefitPlanError(
                f"the plan is for rank {plan.rank} of {plan.size}, the channel is rank {channel.spec.rank} of "
                f"{channel.spec.size}; plan for the world that the channel joins"
            )
        check_mode(verify)
        self.channel, self.tensors, self.verify = channel, tensors, verify
        self.digest = int(plan.digest[:15], 16) ^ {"off": 0, "checksum": 1, "bitwise": 2}[verify]
        self._rounds = self._bind(plan, side)
        self._targets = _in_order(bucket.source for bucket in plan.receives)
        self._receivers = _in_order(bucket.destination for bucket in plan.sends)
        self._sent = sum(bucket.nbytes for bucket in plan.sends)
        self._received = sum(bucket.nbytes for bucket in plan.receives)
        named = {*moved_tensors(plan.sends, "source"), *moved_tensors(plan.receives, "target")}
        self._addresses = {name: tensors[name].data_ptr() for name in named}
        self._device = next((tensors[name].device for name in named), None)

    def _bind(self, plan: RankPlan, side: Side) -> list[_Round]:
        rounds: dict[int, _Round] = {}
        for bucket in plan.sends:
            rounds.setdefault(bucket.round, _Round()).send = BucketMemory(bucket, self.tensors, "source")
        for bucket in plan.receives:
            rounds.setdefault(bucket.round, _Round()).receive = BucketMemory(bucket, self.tensors, "target")
        ordered = [rounds[number] for number in sorted(rounds)]
        bind_staging([one.send for one in ordered if one.send])
        bind_staging([one.receive for one in ordered if one.receive])
        return ordered

    def run(self, version: int) -> RefitReport:
        """Send and receive everything, and prove it if asked to."""
        start = time.perf_counter()
        self._check_memory()
        self._check_headers(version)
        sums: dict[int, list[torch.Tensor]] = {}
        self._pass(lambda memory: self._keep(memory, sums), lambda memory: self._unpack(memory, sums))
        self.channel.synchronize()
        carried = time.perf_counter()
        if self.verify == "checksum":
            self._compare_sums(sums, version)
        elif self.verify == "bitwise":
            self._prove_bytes(version)
        self.channel.synchronize()
        end = time.perf_counter()
        return RefitReport(version, self._sent, self._received, end - start, end - carried)

    def _pass(
        self,
        packed: Callable[[BucketMemory], None],
        received: Callable[[BucketMemory], None],
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """All rounds, two in flight. `packed` sees each message before it goes, `received` each that has come.

        `into` has other memory to receive in, by the identity of the bucket's own.
        """
        flying: list[tuple[_Round, Sequence[Pending]]] = []
        for one in self._rounds:
            # What is passed on came in an earlier round, which must have been unpacked.
            depth = 0 if one.send is not None and one.send.bucket.relay else 1
            while len(flying) > depth:
                self._land(*flying.pop(0), received)
            if one.send is not None:
                one.send.pack()
                packed(one.send)
            flying.append((one, self._post(one, into or {})))
        for landing in flying:
            self._land(*landing, received)

    def _post(self, one: _Round, into: Mapping[int, torch.Tensor]) -> Sequence[Pending]:
        if one.receive is None and one.send is not None:
            return [self.channel.send(one.send.message, one.send.bucket.destination)]
        sends = [(one.send.message, one.send.bucket.destination)] if one.send else []
        to = one.receive
        receives = [(into.get(id(to), to.message), to.bucket.source)] if to else []
        return self.channel.exchange(sends, receives)

    def _land(self, one: _Round, pending: Sequence[Pending], received: Callable[[BucketMemory], None]) -> None:
        _wait_all(pending)
        if one.receive is not None:
            received(one.receive)

    def _keep(self, memory: BucketMemory, sums: dict[int, list[torch.Tensor]]) -> None:
        """The checksums of a packed message, by its receiver."""
        if self.verify == "checksum":
            sums.setdefault(memory.bucket.destination, []).append(checksums(memory))

    def _unpack(self, memory: BucketMemory, sums: dict[int, list[torch.Tensor]]) -> None:
        """Write what came; then the checksums of what is held now, by the sender."""
        if self.verify == "checksum" and not memory.exact:
            sums.setdefault(-1 - memory.bucket.source, []).append(checksums(memory))
        memory.unpack()
        if self.verify == "checksum" and memory.exact:
            memory.repack()
            sums.setdefault(-1 - memory.bucket.source, []).append(checksums(memory))

    def _compare_sums(self, sums: Mapping[int, Sequence[torch.Tensor]], version: int) -> None:
        """Senders tell their checksums, receivers compare."""
        import torch

        held = {peer: torch.cat(list(sums[-1 - peer])) for peer in self._targets}
        told = {peer: torch.empty_like(mine) for peer, mine in held.items()}
        mine = [(torch.cat(list(sums[peer])), peer) for peer in self._receivers]
        _wait_all(self.channel.exchange(mine, [(told[peer], peer) for peer in self._targets]))
        self.channel.synchronize()
        for peer in self._targets:
            buckets = [one.receive.bucket for one in self._rounds if one.receive and one.receive.bucket.source == peer]
            moves = [move for bucket in buckets for move in bucket.moves]
            compare_checksums(moves, told[peer], held[peer], peer, version)

    def _compare(self, memory: BucketMemory, again: torch.Tensor, version: int) -> None:
        """A message that came once more against what is held."""
        wrong = memory.differing(again)
        if wrong:
            raise differs(wrong, memory.bucket.source, version)

    def _prove_bytes(self, version: int) -> None:
        """Everything once more, into memory of its own, compared with what is held."""
        import torch

        largest = max((one.receive.bucket.nbytes for one in self._rounds if one.receive), default=0)
        spares = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        again: dict[int, torch.Tensor] = {}
        receives = [one.receive for one in self._rounds if one.receive]
        for index, memory in enumerate(receives):
            again[id(memory)] = spares[index % 2][: memory.bucket.nbytes]
        self._pass(lambda memory: None, lambda memory: self._compare(memory, again[id(memory)], version), again)

    def _check_headers(self, version: int) -> None:
        """Before any byte moves: all senders follow the same plan and send the same version."""
        headers = [self._header(version).zero_() for _ in self._targets]
        mine = [(self._header(version), peer) for peer in self._receivers]
        _wait_all(self.channel.exchange(mine, list(zip(headers, self._targets, strict=True))))
        if headers:
            self.channel.synchronize()  # reading a header waits for the device, which has no deadline of its own
        for header, peer in zip(headers, self._targets, strict=True):
            digest, sent = header.tolist()
            if digest != self.digest:
                raise ChannelError(
                    f"rank {peer} sends by another refit plan, or refit.verify differs; give every rank its part of one plan"
                )
            if sent != version:
                raise ChannelError(f"rank {peer} sends version {sent}, but version {version} is being received")

    def _header(self, version: int) -> torch.Tensor:
        """`[2]` int64: the plan's digest and the version."""
        import torch

        return torch.tensor([self.digest, version], dtype=torch.int64, device=self._device)

    def _check_memory(self) -> None:
        """The tensors are still where they were; otherwise the bound views write to dead memory."""
        for name, address in self._addresses.items():
            if self.tensors[name].data_ptr() != address:
                raise RunError(f"tensor {name!r} was given new memory after the refit was prepared; prepare it again")


def _in_order(peers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(peers))


def _wait_all(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()
