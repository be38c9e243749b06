"""Replaying a refit plan over a channel: one side packs and sends, the other receives, unpacks and passes on.

Every pair of ranks first exchanges a header, so that weights of another plan, version or way of verifying are refused. What
one rank sends and receives in one round is posted together, in the order of rounds, so that ranks which do both never wait
for each other. A channel that can record replays all rounds as one unit, a CUDA graph, where that proves the faster way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagrl.channels.base import Channel, wait_all
from dagrl.errors import RefitPlanError, RunError
from dagrl.refit.fastest import Fastest
from dagrl.refit.headers import Headers
from dagrl.refit.moves import Move, RankPlan
from dagrl.refit.pack import BucketMemory, spare_messages
from dagrl.refit.rounds import Rounds
from dagrl.refit.verify import Verify, check_mode, checksums, compare_checksums, differs, prepare_checksums

if TYPE_CHECKING:
    import torch

Record = bool | Literal["auto"]
"""Whether rounds are recorded; `auto`: the first refits try both ways, and the others take the faster."""


@dataclass(frozen=True)
class RefitReport:
    """What one rank, or several together, carried: `seconds` from the start to the last byte, proved; the longest of them.

    `pause_s` is how long a generation worker stood still: with the hooks, the commit and what an engine makes anew.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    pause_s: float = 0.0


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
        max(part.pause_s for part in parts),
    )


class _End:
    """One rank of a refit: the plan, the memory that it names, the channel; see `RefitSender`."""

    def __init__(
        self,
        plan: RankPlan,
        tensors: Mapping[str, torch.Tensor],
        channel: Channel,
        verify: Verify = "off",
        record: Record = "auto",
    ) -> None:
        if (channel.spec.rank, channel.spec.size) != (plan.rank, plan.size):
            raise RefitPlanError(
                f"the plan is for rank {plan.rank} of {plan.size}, the channel is rank {channel.spec.rank} of "
                f"{channel.spec.size}; plan for the world that the channel joins"
            )
        check_mode(verify)
        self._channel, self._verify, self._record = channel, verify, record
        self.rounds = Rounds(plan, tensors, channel)
        """What is sent and received, bound to memory."""
        self._prepare()
        self._carried_once = False
        self._ways: Fastest[Callable[[], None]] | None = None  # to carry all rounds, once that was done one by one
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._targets = _in_order(bucket.source for bucket in plan.receives)
        self._receivers = _in_order(bucket.destination for bucket in plan.sends)
        digest = int(plan.digest[:15], 16) ^ {"off": 0, "checksum": 1, "bitwise": 2}[verify]
        self._headers = Headers(channel, digest, self._targets, self._receivers, self.rounds.device)
        self._sent = sum(bucket.nbytes for bucket in plan.sends)
        self._received = sum(bucket.nbytes for bucket in plan.receives)

    def _run(self, version: int) -> RefitReport:
        """Send and receive everything, and prove it if asked to."""
        start = time.perf_counter()
        self._follow_memory()  # before anything is sent: it may refuse tensors, and uploads would wait for messages
        self._headers.post(version)
        self._headers.check(version)
        self._carry()
        if self._verify == "checksum":
            self._compare_sums(version)
        elif self._verify == "bitwise":
            self._prove_bytes(version)
        self._channel.synchronize()
        return RefitReport(version, self._sent, self._received, time.perf_counter() - start)

    def _prepare(self) -> None:
        """Upload what verifying needs: in a refit an upload would wait for a message, without the channel's deadline."""
        if self._verify == "checksum":
            for memory in (*self.rounds.sends, *self.rounds.receives):
                prepare_checksums(memory)

    def _follow_memory(self) -> None:
        """Bind again what was given new memory; otherwise views, tables and graphs would go to dead memory."""
        if self.rounds.moved:
            self._ways, self._carried_once = None, False
            self.rounds.bind()
            self._prepare()

    def _carry(self) -> None:
        """All rounds, to their end: the first time one by one, which also opens connections, then in the faster way."""
        if not self._carried_once:
            self._do(self._run_rounds)
            self._carried_once = True
            return
        if self._ways is None:
            self._ways = Fastest(self._make_ways())
        with self._ways.turn() as carry:
            self._do(carry)

    def _do(self, carry: Callable[[], None]) -> None:
        with self._channel.guarded():
            carry()
        self._channel.synchronize()

    def _make_ways(self) -> list[Callable[[], None]]:
        """Recorded as one unit, or one by one; both where the two are to be compared."""
        if self._record is False:
            return [self._run_rounds]
        replay = self._channel.record(self._run_rounds)
        if replay == self._run_rounds:  # this channel cannot record
            return [self._run_rounds]
        sums = self._sums  # which the recorded rounds write

        def recorded() -> None:
            replay()
            self._sums = sums

        return [recorded] if self._record is True else [recorded, self._run_rounds]

    def _run_rounds(self) -> None:
        self._sums = {}
        self.rounds.run(self._keep, self._unpack)

    def _keep(self, memory: BucketMemory) -> None:
        """The checksums of what is sent, by its receiver."""
        if self._verify == "checksum":
            self._sums.setdefault(memory.bucket.destination, []).append(checksums(memory))

    def _unpack(self, memory: BucketMemory) -> None:
        """Write what came; then the checksums of what is held now, by the sender."""
        memory.unpack()
        if self._verify == "checksum":
            self._sums.setdefault(-1 - memory.bucket.source, []).append(checksums(memory))

    def _compare_sums(self, version: int) -> None:
        """Senders tell their checksums, receivers compare."""
        import torch

        held = {peer: torch.cat(self._sums[-1 - peer]) for peer in self._targets}
        told = {peer: torch.empty_like(mine) for peer, mine in held.items()}
        mine = [(torch.cat(self._sums[peer]), peer) for peer in self._receivers]
        wait_all(self._channel.exchange(mine, [(told[peer], peer) for peer in self._targets]))
        self._channel.synchronize()
        for peer in self._targets:
            moves = [move for one in self.rounds.receives if one.bucket.source == peer for move in one.bucket.moves]
            compare_checksums(moves, told[peer], held[peer], peer, version)

    def _prove_bytes(self, version: int) -> None:
        """Everything once more, into memory of its own, compared with what is held."""
        receives = self.rounds.receives
        again = {id(memory): came for memory, came in zip(receives, spare_messages(receives), strict=True)}
        wrong: dict[int, list[Move]] = {}  # by sender

        def compare(memory: BucketMemory) -> None:
            self._channel.synchronize()  # a comparison waits on the host, where only the channel knows a deadline
            if moves := memory.differing(again[id(memory)]):
                wrong.setdefault(memory.bucket.source, []).extend(moves)

        self.rounds.run(lambda memory: None, compare, again)  # to its end: no message stays behind in the channel
        for peer, moves in wrong.items():
            raise differs(moves, peer, version)


class RefitSender(_End):
    """The source side of a refit on one rank.

    `tensors` are the live local tensors by the names in the plan. One that has other memory at a later refit is followed
    there, which costs the time of preparing again. `verify` must be the same on all ranks; by `record` all but the first
    refit are replayed as one CUDA graph, where the channel can. Raises RefitPlanError when channel, tensors or dtypes do
    not fit the plan. After an error other than RunError messages may be under way: see `dagrl.refit.commit`.
    """

    def send(self, version: int) -> RefitReport:
        """Send the weights as `version`; they may change again when this returns.

        Raises ChannelError, and RefitPlanError when a tensor that moved no longer fits the plan.
        """
        return self._run(version)


class RefitReceiver(_End):
    """The destination side of a refit on one rank; see `RefitSender`."""

    def receive(self, version: int) -> RefitReport:
        """Receive the weights of `version` into the live tensors.

        Raises ChannelError when the channel breaks or a sender has another plan or version, RunError when what is held in
        the end is not what was sent: the weights may then be torn, and must not be used before a whole refit has succeeded.
        """
        return self._run(version)


def _in_order(peers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(peers))
