"""One rank's end of a refit: senders pack and send; receivers receive, unpack and relay.

Each pair of ranks first exchanges a header, which rejects another plan, version or verify mode. A rank posts what it sends
and receives in a round together, in the order of rounds, so that ranks that do both never wait for each other.

Two buckets are in flight: while one is sent, the next is packed and the previous one is unpacked. On GPUs nothing here waits
on the host. Copies run on the current stream and messages on the channel's stream, and events order the two.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dagrl.channels.base import Channel, PendingMessage, wait_all
from dagrl.errors import ChannelError, RefitPlanError
from dagrl.refit.carry.mapped import MappedMoves
from dagrl.refit.carry.pack import Addresses, BucketMemory, bind_staging, moved_tensors
from dagrl.refit.carry.verify import checksums, compare_checksums, prepare_checksums
from dagrl.refit.transfers import RankPlan, RefitReport

BucketCallback = Callable[[BucketMemory], None]


@dataclass
class RefitRound:
    """At most one bucket to send and one to receive, in round `number`."""

    number: int
    send: BucketMemory | None = None
    receive: BucketMemory | None = None


class RefitRounds:
    """All rounds of `plan`, bound to the memory that `tensors` have at the last call of `bind`."""

    def __init__(self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel) -> None:
        self._tensors, self._channel = tensors, channel
        self._addresses = Addresses({}, ())
        self.bind(plan)

    def bind(self, plan: RankPlan) -> None:
        """Binds the rounds of `plan` to the memory that tensors have now.

        Frees the earlier staging memory first, so that there is never twice as much. Uploads tables to GPUs, which waits on
        the host for the current stream. Raises RefitPlanError if tensors or dtypes do not fit the plan.
        """
        self._addresses.forget()
        self._rounds: list[RefitRound] = []
        rounds: dict[int, RefitRound] = {}
        for bucket in plan.sends:
            rounds.setdefault(bucket.round, RefitRound(bucket.round)).send = BucketMemory(bucket, self._tensors, "source")
        for bucket in plan.receives:
            rounds.setdefault(bucket.round, RefitRound(bucket.round)).receive = BucketMemory(bucket, self._tensors, "target")
        ordered = [rounds[number] for number in sorted(rounds)]
        sends, receives = (
            [round_.send for round_ in ordered if round_.send],
            [round_.receive for round_ in ordered if round_.receive],
        )
        self.staging_bytes = bind_staging(sends) + bind_staging(receives)
        overlaps = self._channel.spec.kind == "nccl"  # messages are kernels that run while others pack and unpack
        for memory in (*sends[:1], *receives[-1:]) if overlaps else (*sends, *receives):
            memory.alone = True
        self._rounds = ordered
        names = [*moved_tensors(plan.sends, "source"), *moved_tensors(plan.receives, "target")]
        self._addresses = Addresses(self._tensors, names)
        self.device = next((self._tensors[name].device for name in names), None)

    @property
    def sends(self) -> list[BucketMemory]:
        """The buckets to send, in order."""
        return [round_.send for round_ in self._rounds if round_.send is not None]

    @property
    def receives(self) -> list[BucketMemory]:
        """The buckets to receive, in order."""
        return [round_.receive for round_ in self._rounds if round_.receive is not None]

    @property
    def moved(self) -> bool:
        """Whether a tensor has new memory, so that the bound memory must not be used."""
        return self._addresses.moved

    def run(self, packed: BucketCallback, received: BucketCallback) -> None:
        """Sends and receives all buckets. Calls `packed` with each bucket before it is sent, `received` to unpack each."""
        flying: list[tuple[RefitRound, Sequence[PendingMessage]]] = []
        for round_ in self._rounds:
            # A relayed bucket was received in an earlier round, which must have been unpacked.
            depth = 0 if round_.send is not None and round_.send.bucket.relay else 1
            while len(flying) > depth:
                self._land(*flying.pop(0), received)
            if round_.send is not None:
                round_.send.copy()
                packed(round_.send)
            flying.append((round_, self._post(round_)))
        for landing in flying:
            self._land(*landing, received)

    def _post(self, round_: RefitRound) -> Sequence[PendingMessage]:
        """Posts the round as one group. Both ends of a bucket post its messages in the same order."""
        send, receive = round_.send, round_.receive
        sends = [(message, send.bucket.destination) for message in send.messages] if send else []
        receives = [(message, receive.bucket.source) for message in receive.messages] if receive else []
        return self._channel.exchange(sends, receives) if sends or receives else []

    def _land(self, round_: RefitRound, pending: Sequence[PendingMessage], received: BucketCallback) -> None:
        wait_all(pending)
        if round_.receive is not None:
            received(round_.receive)


class Handshake:
    """Checks that each pair of ranks has the same plan, version and verify mode before weights are sent.

    Sends `[3]` int64 from each sender to each of its receivers: the plan's digest, the version, a number of its own.

    `senders` are the ranks that send to this one, `receivers` those that it sends to. Memory is allocated once, on GPUs with
    a pinned copy on the host, so that a check costs one short message.
    """

    def __init__(
        self, channel: Channel, digest: int, senders: Sequence[int], receivers: Sequence[int], device: torch.device | None
    ) -> None:
        pinned = device is not None and device.type == "cuda"
        self._channel, self._digest = channel, digest
        self._senders, self._receivers = senders, receivers
        self._own_host = torch.zeros(3, dtype=torch.int64, pin_memory=pinned)
        self._others_host = torch.zeros(len(senders), 3, dtype=torch.int64, pin_memory=pinned)
        self._own = torch.zeros(3, dtype=torch.int64, device=device)
        self._others = torch.zeros(len(senders), 3, dtype=torch.int64, device=device)

    def post(self, version: int, number: int = 0) -> None:
        """Sends this rank's header and receives the others'."""
        if not self._senders and not self._receivers:
            return
        self._own_host[0], self._own_host[1], self._own_host[2] = self._digest, version, number
        self._own.copy_(self._own_host, non_blocking=True)
        sends = [(self._own, peer) for peer in self._receivers]
        wait_all(self._channel.exchange(sends, list(zip(self._others, self._senders, strict=True))))
        self._others_host.copy_(self._others, non_blocking=True)

    def check(self, version: int) -> dict[int, int]:
        """Returns the number of each sender, when all of them have announced this plan and `version`.

        Otherwise raises ChannelError that names the sender, and breaks the channel, as peers wait for messages.
        """
        if not self._senders:
            return {}
        self._channel.synchronize()
        for (digest, sent, _), peer in zip(self._others_host.tolist(), self._senders, strict=True):
            if digest != self._digest:
                raise self._broken(
                    f"rank {peer} has another refit plan or refit.verify; give every rank its part of one plan"
                )
            if sent != version:
                raise self._broken(
                    f"rank {peer} sends version {sent}, but this rank receives version {version}; "
                    "replay one version on all ranks"
                )
        return dict(zip(self._senders, self._others_host[:, 2].tolist(), strict=True))

    def _broken(self, difference: str) -> ChannelError:
        self._channel.abort(difference)
        return ChannelError(difference)


class _Endpoint:
    """One rank's end of a refit: its plan, the tensors named there, and the channel; see `RefitSender`."""

    def __init__(
        self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel, *, lends: bool = False
    ) -> None:
        if (channel.spec.rank, channel.spec.size) != (plan.rank, plan.size):
            raise RefitPlanError(
                f"the plan is for rank {plan.rank} of {plan.size}, the channel is rank {channel.spec.rank} of "
                f"{channel.spec.size}; make the plan for the ranks that the channel joins"
            )
        self._channel, self._verify = channel, plan.verify
        self._mapped = MappedMoves(plan, tensors, channel, lends)
        self.rounds = RefitRounds(self._mapped.rest, tensors, channel)
        """The rounds of this rank, bound to memory."""
        self._prepare()
        self._sums: dict[int, torch.Tensor] = {}  # by the id of the bucket's memory
        self._targets = list(dict.fromkeys(bucket.source for bucket in plan.receives))
        self._receivers = list(dict.fromkeys(bucket.destination for bucket in plan.sends))
        digest = int(plan.digest[:15], 16) ^ (plan.verify == "checksum")
        device = None if self._mapped else self.rounds.device
        self._headers = Handshake(channel, digest, self._targets, self._receivers, device)
        self._sent = sum(bucket.nbytes for bucket in plan.sends)
        self._received = sum(bucket.nbytes for bucket in plan.receives)

    def _run(self, version: int) -> RefitReport:
        """Sends and receives everything, and verifies it if the plan says so."""
        start = time.perf_counter()
        if self.rounds.moved or self._mapped.moved:  # views and tables would use freed memory
            self._mapped.bind()  # before any message: it may reject tensors, and uploads would wait for messages
            self.rounds.bind(self._mapped.rest)
            self._prepare()
        self._mapped.start()
        self._headers.post(version, self._mapped.lent)
        numbers = self._headers.check(version)
        if self._mapped.drop([peer for peer, number in numbers.items() if not number]):
            self.rounds.bind(self._mapped.rest)
        self._mapped.read(numbers)
        self._sums = {}
        with self._channel.guarded():
            self.rounds.run(self._keep, self._unpack)
        self._channel.synchronize()
        self._mapped.finish()
        if self._verify == "checksum":
            self._compare_sums(version)
        self._channel.synchronize()
        return RefitReport(version, self._sent, self._received, time.perf_counter() - start)

    def _prepare(self) -> None:
        """Uploads what verifying needs. During a refit an upload would wait for messages, without the channel's deadline."""
        if self._verify == "checksum":
            for memory in (*self.rounds.sends, *self.rounds.receives):
                prepare_checksums(memory)

    def _keep(self, memory: BucketMemory) -> None:
        """Keeps the checksums of a bucket that is packed, or unpacked."""
        if self._verify == "checksum":
            self._sums[id(memory)] = checksums(memory)

    def _unpack(self, memory: BucketMemory) -> None:
        """Unpacks a received bucket, then keeps the checksums of the tensors."""
        memory.copy()
        self._keep(memory)

    def _compare_sums(self, version: int) -> None:
        """Sends the senders' checksums to the receivers, which compare them with theirs."""

        def sums(memories: Iterable[BucketMemory]) -> torch.Tensor:
            return torch.cat([self._sums[id(memory)] for memory in memories])

        sends, receives = self.rounds.sends, self.rounds.receives
        own = {peer: sums(memory for memory in receives if memory.bucket.source == peer) for peer in self._targets}
        expected = {peer: torch.empty_like(mine) for peer, mine in own.items()}
        mine = [(sums(memory for memory in sends if memory.bucket.destination == peer), peer) for peer in self._receivers]
        wait_all(self._channel.exchange(mine, [(expected[peer], peer) for peer in self._targets]))
        self._channel.synchronize()
        for peer in self._targets:
            moves = [move for memory in receives if memory.bucket.source == peer for move in memory.bucket.moves]
            compare_checksums(moves, expected[peer], own[peer], peer, version)


class RefitSender(_Endpoint):
    """The source side of a refit on one rank.

    `tensors` are the live local tensors by the names in the plan. If one has new memory at a later refit, memory is bound
    again, which costs as much as the first time. `lends`: receivers on the same GPU read the tensors where they are; call
    `reclaim` before their memory is freed. Raises RefitPlanError if channel, tensors or dtypes do not fit the plan. After
    an error other than RunError messages may still be pending; see `dagrl.refit.carry.commit`.
    """

    def reclaim(self) -> None:
        """Returns when no other process maps the tensors. The next refit maps them again."""
        self._mapped.reclaim()

    def send(self, version: int) -> RefitReport:
        """Sends the weights as `version`. They may change when this returns.

        Raises ChannelError, and RefitPlanError if a tensor with new memory no longer fits the plan.
        """
        return self._run(version)


class RefitReceiver(_Endpoint):
    """The destination side of a refit on one rank; see `RefitSender`."""

    def receive(self, version: int) -> RefitReport:
        """Receives the weights of `version` into the live tensors.

        Raises ChannelError if the channel breaks or a sender has another plan or version, RunError if verification fails.
        After an error the weights may be torn and must not be used until a complete refit succeeds.
        """
        return self._run(version)
