"""Summarizes a refit plan: bytes per pair and link, balance, staging memory, duration."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dagrl.channels.base import MAILBOX_SLOTS
from dagrl.refit.plan.ordering import BETWEEN_HOSTS, IN_HOST, message_s, simulate
from dagrl.refit.plan.routes import RankPair

SHOWN_PAIRS = 64
RELAYING_BUCKETS = 3
"""Buckets that a rank which relays stages at once: two that it receives, and one that it packs when they have arrived."""


@dataclass(frozen=True)
class PlanSummary:
    """The numbers of a plan. `messages` has `(round, sender, receiver, bytes)` of each bucket, in order, by channel rank.

    `copied` has the bytes of each bucket that the sender packs and the receiver unpacks. The rest is sent directly between
    tensors, which must be contiguous and have the dtype on the wire. With `mailboxes` messages
    are sent through memory of the sender (`channels/ipc.py`).
    """

    messages: Sequence[tuple[int, int, int, int]]
    copied: Sequence[tuple[int, int]]
    sources: int
    destinations: int
    hosts: tuple[int, ...]
    mailboxes: bool = False

    @cached_property
    def pairs(self) -> dict[RankPair, int]:
        """Bytes per (sender, receiver)."""
        sizes: dict[RankPair, int] = defaultdict(int)
        for _, sender, receiver, nbytes in self.messages:
            sizes[sender, receiver] += nbytes
        return dict(sizes)

    @property
    def staging_bytes(self) -> int:
        """Most staging memory of any rank: for two buckets, for `RELAYING_BUCKETS` if it relays, and a mailbox per receiver.

        Transposed tensors need more.
        """
        largest: dict[tuple[int, int], int] = defaultdict(int)  # (rank, sends or receives)
        boxes: dict[RankPair, int] = defaultdict(int)
        for (_, sender, receiver, nbytes), copied in zip(self.messages, self.copied, strict=True):
            boxes[sender, receiver] = max(boxes[sender, receiver], nbytes)
            for side, rank in enumerate((sender, receiver)):
                largest[rank, side] = max(largest[rank, side], copied[side])
        staging: dict[int, int] = defaultdict(int)
        for (rank, side), nbytes in largest.items():
            relays = side == 0 and rank >= self.sources
            staging[rank] += nbytes if relays else 2 * nbytes
        if self.mailboxes:
            for (sender, _), nbytes in boxes.items():
                staging[sender] += MAILBOX_SLOTS * nbytes
        return max(staging.values(), default=0)

    @property
    def rounds(self) -> int:
        """Rounds of the rank that takes part in the most."""
        rounds_of: dict[int, set[int]] = defaultdict(set)
        for number, sender, receiver, _ in self.messages:
            rounds_of[sender].add(number)
            rounds_of[receiver].add(number)
        return max(map(len, rounds_of.values()), default=0)

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each source sends."""
        counts = self._bytes(0)
        return tuple(counts.get(rank, 0) for rank in range(self.sources))

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes that each destination receives."""
        counts = self._bytes(1)
        return tuple(counts.get(self.sources + rank, 0) for rank in range(self.destinations))

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes per (sending host, receiving host), with those inside each host."""
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        for (sender, receiver), count in self.pairs.items():
            sizes[self.hosts[sender], self.hosts[receiver]] += count
        return dict(sizes)

    @property
    def crossing(self) -> int:
        """Bytes that are sent from one host to another."""
        return sum(count for (first, second), count in self.links.items() if first != second)

    @property
    def floor_s(self) -> float:
        """The seconds that the busiest link needs at least: no schedule of this plan is faster."""
        needed: dict[tuple[int, int, bool], float] = defaultdict(float)  # (rank, sends or receives, to another host)
        for pair, count in self.pairs.items():
            crosses = self._crosses(*pair)
            for side, rank in enumerate(pair):
                needed[rank, side, crosses] += message_s(count, crosses)
        return max(needed.values(), default=0.0)

    @property
    def busiest_s(self) -> float:
        """The seconds that the busiest rank needs at least if it sends and receives one message at a time."""
        needed: dict[tuple[int, int], float] = defaultdict(float)
        for pair, count in self.pairs.items():
            for side, rank in enumerate(pair):
                needed[rank, side] += message_s(count, self._crosses(*pair))
        return max(needed.values(), default=0.0)

    @property
    def schedule_s(self) -> float:
        """The seconds that the rounds take if links keep their speed and packing overlaps with messages."""
        return simulate(
            (number, sender, receiver, message_s(nbytes, self._crosses(sender, receiver)))
            for number, sender, receiver, nbytes in self.messages
        )

    def _bytes(self, side: int) -> dict[int, int]:
        sizes: dict[int, int] = defaultdict(int)
        for pair, count in self.pairs.items():
            sizes[pair[side]] += count
        return sizes

    def _crosses(self, sender: int, receiver: int) -> bool:
        return self.hosts[sender] != self.hosts[receiver]

    def __str__(self) -> str:
        """The plan as printed, with durations at the links' speeds and the `SHOWN_PAIRS` largest pairs and links."""
        packed, unpacked = (sum(copied[side] for copied in self.copied) for side in range(2))
        lines = [
            f"refit of {_mb(sum(self.received))} from {self.sources} to {self.destinations} ranks, "
            f"{len(self.messages)} buckets, at most {self.rounds} rounds and {_mb(self.staging_bytes)} of staging per rank",
            f"packed by senders: {_mb(packed)}, unpacked by receivers: {_mb(unpacked)}; the rest is sent directly between "
            "tensors",
            f"sent per rank: {_spread(self.sent)}; received per rank: {_spread(self.received)}",
            f"schedule {_seconds(self.schedule_s)}, floor {_seconds(self.busiest_s)} of the busiest rank, "
            f"{_seconds(self.floor_s)} of the busiest link, at {IN_HOST / 1e9:g} GB/s in a host"
            + (f" and {BETWEEN_HOSTS / 1e9:g} GB/s between hosts" if len(set(self.hosts)) > 1 else ""),
        ]
        if len(set(self.hosts)) > 1:
            between = {link: count for link, count in self.links.items() if link[0] != link[1]}
            lines.append(
                f"{len(set(self.hosts))} hosts: {_mb(self.crossing)} are sent between hosts, over {len(between)} links "
                f"({_spread([*between.values()] or [0])}), {_mb(sum(self.links.values()) - self.crossing)} stay inside hosts"
            )
            lines += _largest(between, "host {:>3} -> host {:<3} {:>14}", "links between hosts")
        return "\n".join(lines + _largest(self.pairs, "{:>4} -> {:<4} {:>12}", "pairs"))


def _largest(sizes: Mapping[tuple[int, int], int], line: str, kind: str) -> list[str]:
    """Returns a line for each of the `SHOWN_PAIRS` largest, by number, and counts the others."""
    largest = sorted(sorted(sizes.items(), key=lambda item: -item[1])[:SHOWN_PAIRS])
    more = len(sizes) - len(largest)
    lines = ["  " + line.format(*pair, _mb(count)) for pair, count in largest]
    return [*lines, *([f"  and {more} smaller {kind}"] if more else [])]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.3f} MB"


def _spread(counts: Sequence[int]) -> str:
    mean = sum(counts) / len(counts)
    return f"{_mb(min(counts))} to {_mb(max(counts))}, largest over mean {max(counts) / mean if mean else 1:.3f}"
