"""The rounds of one rank, bound to memory: what it packs, sends, receives and unpacks in each, and in which order.

Two buckets are in flight: while one travels, the next is packed and the one before is unpacked. On GPUs nothing here
waits on the host: copies are launched on the current stream and messages on the channel's, and events order the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagrl.channels.base import Channel, Pending, wait_all
from dagrl.refit.moves import RankPlan
from dagrl.refit.pack import BucketMemory, bind_staging, moved_tensors
from dagrl.telemetry.annotate import annotate

if TYPE_CHECKING:
    import torch

Seen = Callable[[BucketMemory], None]


@dataclass
class Round:
    """What one rank does in round `number`: at most one bucket each way."""

    number: int
    send: BucketMemory | None = None
    receive: BucketMemory | None = None


class Rounds:
    """All rounds of `plan`, over `tensors` as they lie in memory when `bind` is called: at first, and after they moved."""

    def __init__(self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], channel: Channel) -> None:
        self._plan, self._tensors, self._channel = plan, tensors, channel
        self._named = list(dict.fromkeys([*moved_tensors(plan.sends, "source"), *moved_tensors(plan.receives, "target")]))
        self._rounds: list[Round] = []
        self.bind()
        self.device = next((tensors[name].device for name in self._named), None)

    def bind(self) -> None:
        """Bind to the memory that tensors have now.

        What was bound before is let go first: memory never holds staging for both. Tables for GPUs are uploaded, which
        waits on the host for the current stream. Raises RefitPlanError when tensors or dtypes do not fit the plan.
        """
        self._rounds, self._addresses = [], list[int]()
        self._rounds = self._bound()
        self._pointers = [self._tensors[name].data_ptr for name in self._named]
        self._addresses = [pointer() for pointer in self._pointers]

    def _bound(self) -> list[Round]:
        rounds: dict[int, Round] = {}
        for bucket in self._plan.sends:
            rounds.setdefault(bucket.round, Round(bucket.round)).send = BucketMemory(bucket, self._tensors, "source")
        for bucket in self._plan.receives:
            rounds.setdefault(bucket.round, Round(bucket.round)).receive = BucketMemory(bucket, self._tensors, "target")
        ordered = [rounds[number] for number in sorted(rounds)]
        sends, receives = [one.send for one in ordered if one.send], [one.receive for one in ordered if one.receive]
        self.staging_bytes = bind_staging(sends) + bind_staging(receives)
        beside = self._channel.spec.kind == "nccl"  # messages are kernels, which run while others pack and unpack
        for memory in (*sends[:1], *receives[-1:]) if beside else (*sends, *receives):
            memory.alone = True
        return ordered

    @property
    def sends(self) -> list[BucketMemory]:
        """What is sent, in order."""
        return [one.send for one in self._rounds if one.send is not None]

    @property
    def receives(self) -> list[BucketMemory]:
        """What is received, in order."""
        return [one.receive for one in self._rounds if one.receive is not None]

    @property
    def moved(self) -> bool:
        """Whether a tensor was given new memory since, so that what is bound here is dead."""
        return [pointer() for pointer in self._pointers] != self._addresses

    def run(self, packed: Seen, received: Seen, into: Mapping[int, Sequence[torch.Tensor]] | None = None) -> None:
        """Carry everything. `packed` sees each bucket before it goes, `received` each that has come, to unpack it.

        `into` has other memory to receive in, by the identity of the bucket's own.
        """
        flying: list[tuple[Round, Sequence[Pending]]] = []
        for one in self._rounds:
            # What is passed on came in an earlier round, which must have been unpacked.
            depth = 0 if one.send is not None and one.send.bucket.relay else 1
            while len(flying) > depth:
                self._land(*flying.pop(0), received)
            with annotate(f"refit bucket {one.number}: pack, post"):
                if one.send is not None:
                    one.send.pack()
                    packed(one.send)
                flying.append((one, self._post(one, into or {})))
        for landing in flying:
            self._land(*landing, received)

    def run_wire(self) -> None:
        """The messages alone, without packing or unpacking: to measure what they cost. What is sent is left undefined."""
        for one in self._rounds:
            wait_all(self._post(one, {}))

    def _post(self, one: Round, into: Mapping[int, Sequence[torch.Tensor]]) -> Sequence[Pending]:
        """One group: both ends of a bucket post its messages in one order."""
        sends = [(message, one.send.bucket.destination) for message in one.send.messages] if one.send else []
        to = one.receive
        receives = [(message, to.bucket.source) for message in into.get(id(to), to.messages)] if to else []
        return self._channel.exchange(sends, receives)

    def _land(self, one: Round, pending: Sequence[Pending], received: Seen) -> None:
        with annotate(f"refit bucket {one.number}: land"):
            wait_all(pending)
            if one.receive is not None:
                received(one.receive)
