"""Delta refits: a sender sends only the bytes that changed since the last refit.

A sender keeps a copy of what it last sent of each bucket. Every refit then has three steps:

1. Receivers tell their senders which refit they hold. Each refit of a sender has a random number. A receiver has none
   while its weights may be torn.
2. Senders pack the buckets that their receivers hold, compare them with the copies, and tell the sizes of the packets.
3. All rounds run, with packets (`changes.py`) in place of messages. A receiver writes the changes into the live tensors.

A bucket is sent whole if its receiver does not hold the last refit, if the receiver casts some of it (and no longer has the
bytes that did not change), if more than `PAYS` of it would have to be sent, or if it is relayed inside a host. Both ends of
a new connection start without copies, so the first refit is whole.

Over fast links comparing may take longer than it saves.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from dagrl.channels.base import Channel, wait_all
from dagrl.channels.spec import ChannelKind
from dagrl.errors import RefitPlanError
from dagrl.refit.carry.changes import apply, encode, pieces
from dagrl.refit.carry.pack import BucketMemory
from dagrl.refit.carry.rounds import BucketCallback, RefitRounds
from dagrl.refit.transfers import DeltaMode

if TYPE_CHECKING:
    import torch

PAYS = 0.5
"""Packets of a bucket are at most this share of its bytes."""
_NONE = 0  # the number of no refit
_WHOLE = -1  # in place of the sizes of packets

Packets = dict[int, list["torch.Tensor"]]
"""The packets of buckets, by the `id` of their memory."""


def check_delta(delta: DeltaMode, kind: ChannelKind) -> None:
    """Raises RefitPlanError if a channel of `kind` cannot carry a delta refit."""
    if delta != "off" and kind == "ipc":
        raise RefitPlanError(
            f"refit.delta is {delta!r}, but train and generation workers share GPUs; copies inside a GPU are faster than "
            "comparing, and the sender's copy would take its memory. Set refit.delta to off"
        )


class Delta:
    """One rank's end of delta refits. `sent` and `received` are the bytes of the last run."""

    def __init__(self, rounds: RefitRounds, channel: Channel) -> None:
        self._rounds, self._channel = rounds, channel
        self._copies: dict[int, list[torch.Tensor]] = {}  # by position among the sends
        self._sent_last = self._sending = _NONE
        self._held: dict[int, int] = {}  # sender -> the refit that this rank holds
        self._receiving: dict[int, int] = {}
        self._in_use: list[object] = []  # memory of messages
        self.sent = self.received = 0

    def forget(self) -> None:
        """Makes the next refit whole for this receiver: its tensors have lost their content."""
        self._held = {}

    def run(self, keep: BucketCallback, unpack: BucketCallback) -> None:
        """Sends and receives everything. Calls `keep` with each packed bucket, `unpack` to unpack each received one."""
        import torch

        refits = self._exchange_refits()
        last, self._sent_last = self._sent_last, _NONE
        positions = {id(memory): position for position, memory in enumerate(self._rounds.sends)}
        packets = self._compare(refits, last, keep)
        self._sending = secrets.randbits(62) | 1
        lengths = self._exchange_lengths(packets)

        def packed(memory: BucketMemory) -> None:
            keep(memory)
            if not memory.bucket.relay:
                self._remember(positions[id(memory)], memory.messages)

        def received(memory: BucketMemory) -> None:
            if id(memory) in lengths:
                memory.reload()
                _write(memory, into[id(memory)], lengths[id(memory)])
            unpack(memory)

        instead = {key: [torch.cat(parts)] if any(map(len, parts)) else [] for key, parts in packets.items()}
        into = self._buffers(lengths)
        self._in_use += [instead, into]
        self.sent = sum(_bytes(memory, instead) for memory in self._rounds.sends)
        self.received = sum(_bytes(memory, into) for memory in self._rounds.receives)
        self._rounds.run(packed, received, into, instead)

    def complete(self) -> None:
        """Lets the next refit build on this one. Call it when all messages have arrived and are verified."""
        self._sent_last, self._held, self._in_use = self._sending, self._receiving, []

    def _exchange_refits(self) -> dict[int, list[int]]:
        """Sends each sender the refit that this rank holds in each bucket. Returns those of the receivers, by rank."""
        numbers = {
            peer: [_NONE if memory.casts else self._held.get(peer, _NONE) for memory in some]
            for peer, some in _by_peer(self._rounds.receives).items()
        }
        self._held = {}
        return self._exchange(numbers, {peer: len(some) for peer, some in _by_peer(self._rounds.sends).items()})

    def _compare(self, refits: Mapping[int, list[int]], last: int, keep: BucketCallback) -> Packets:
        """Returns the packets of the buckets to send as changes."""
        packets: Packets = {}
        if last == _NONE:
            return packets
        numbers = {peer: iter(some) for peer, some in refits.items()}
        for position, memory in enumerate(self._rounds.sends):
            number = next(numbers[memory.bucket.destination])
            if number != last or memory.bucket.relay:
                continue
            memory.pack()
            changes = _encode(memory, self._copies[position])
            if changes is not None:
                packets[id(memory)] = changes
                keep(memory)
        return packets

    def _exchange_lengths(self, packets: Packets) -> dict[int, list[int]]:
        """Sends each receiver the number of this refit and the sizes of all packets. Returns the sizes to receive."""
        own: dict[int, list[int]] = {}
        for peer, some in _by_peer(self._rounds.sends).items():
            sizes = [[len(packet) for packet in packets[id(one)]] if id(one) in packets else _whole(one) for one in some]
            own[peer] = [self._sending, *(size for one in sizes for size in one)]
        receives = _by_peer(self._rounds.receives)
        received = self._exchange(own, {peer: 1 + sum(len(_whole(one)) for one in some) for peer, some in receives.items()})
        self._receiving = {peer: numbers[0] for peer, numbers in received.items()}
        lengths: dict[int, list[int]] = {}
        for peer, some in receives.items():
            numbers = iter(received[peer][1:])
            for memory in some:
                of_pieces = list(islice(numbers, len(_whole(memory))))
                if _WHOLE not in of_pieces:
                    lengths[id(memory)] = of_pieces
        return lengths

    def _exchange(self, mine: Mapping[int, list[int]], sizes: Mapping[int, int]) -> dict[int, list[int]]:
        """Sends numbers to ranks, and returns the `sizes` numbers that ranks send."""
        import torch

        device = self._rounds.device
        sends = [(torch.tensor(numbers, dtype=torch.int64, device=device), peer) for peer, numbers in mine.items()]
        buffers = {peer: torch.empty(size, dtype=torch.int64, device=device) for peer, size in sizes.items()}
        wait_all(self._channel.exchange(sends, [(buffer, peer) for peer, buffer in buffers.items()]))
        self._channel.synchronize()  # with a deadline, which reading a GPU's memory has not
        return {peer: buffer.tolist() for peer, buffer in buffers.items()}

    def _remember(self, position: int, messages: Sequence[torch.Tensor]) -> None:
        """Keeps a copy of a bucket that is sent whole."""
        if position not in self._copies:
            self._copies[position] = [message.clone() for message in messages]
            return
        for copy, message in zip(self._copies[position], messages, strict=True):
            copy.copy_(message)

    def _buffers(self, lengths: Mapping[int, Sequence[int]]) -> dict[int, list[torch.Tensor]]:
        """Returns memory for each packet to receive, in two buffers in turn."""
        import torch

        largest = max(map(sum, lengths.values()), default=0)
        slots = [torch.empty(largest, dtype=torch.uint8, device=self._rounds.device) for _ in range(2)]
        return {
            id(memory): [slots[number % 2][: sum(lengths[id(memory)])]] if any(lengths[id(memory)]) else []
            for number, memory in enumerate(self._rounds.receives)
            if id(memory) in lengths
        }


def _encode(memory: BucketMemory, copies: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Returns the packets of all pieces of a packed bucket and updates the copies; None if it should be sent whole."""
    budget = int(PAYS * memory.bucket.nbytes)
    bucket_packets: list[torch.Tensor] = []
    for message, copy in zip(memory.messages, copies, strict=True):
        packets = encode(message, copy, budget)
        if packets is None:
            return None
        budget -= sum(map(len, packets))
        bucket_packets += packets
    return bucket_packets


def _write(memory: BucketMemory, packet: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
    """Writes the received changes of a bucket into its messages."""
    import torch

    if not packet:
        return
    parts = list(torch.split(packet[0], list(lengths)))
    for message in memory.messages:
        count = len(pieces(len(message)))
        apply(parts[:count], message)
        parts = parts[count:]


def _whole(memory: BucketMemory) -> list[int]:
    """Returns what is told in place of the sizes of packets, a number for each piece."""
    return [_WHOLE] * sum(len(pieces(message.nbytes)) for message in memory.bucket.messages)


def _bytes(memory: BucketMemory, packets: Mapping[int, Sequence[torch.Tensor]]) -> int:
    if id(memory) not in packets:
        return memory.bucket.nbytes
    return sum(len(packet) for packet in packets[id(memory)])


def _by_peer(memories: Sequence[BucketMemory]) -> dict[int, list[BucketMemory]]:
    """Returns the buckets of each rank at the other end, in order."""
    by_peer: dict[int, list[BucketMemory]] = {}
    for memory in memories:
        peer = memory.bucket.destination if memory.side == "source" else memory.bucket.source
        by_peer.setdefault(peer, []).append(memory)
    return by_peer
