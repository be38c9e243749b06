"""The rounds of one rank, bound to memory: what it packs, sends, receives and unpacks in each, in order.

Two buckets are in flight: while one is sent, the next is packed and the previous one is unpacked. On GPUs nothing here waits
on the host. Copies run on the current stream and messages on the channel's stream, and events order the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dagrl.channels.base import Channel, PendingMessage, wait_all
from dagrl.refit.carry.pack import Addresses, BucketMemory, bind_staging, moved_tensors
from dagrl.refit.transfers import RankPlan

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
        self._rounds = self._bound(plan)
        names = [*moved_tensors(plan.sends, "source"), *moved_tensors(plan.receives, "target")]
        self._addresses = Addresses(self._tensors, names)
        self.device = next((self._tensors[name].device for name in names), None)

    def _bound(self, plan: RankPlan) -> list[RefitRound]:
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
        return ordered

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
