"""A refit plan in numbers: bytes per pair and per link, balance, staging memory, time at given link speeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dagrl.channels.base import MAILBOX_SLOTS
from dagrl.refit.order import simulate
from dagrl.refit.schedule import LinkSpeeds, Pair

SHOWN_PAIRS = 64


@dataclass(frozen=True)
class PlanSummary:
    """Bytes of a plan. `messages` are `(round, sender, receiver, bytes)`, one for each bucket, in order, of channel ranks.

    `copied` has how many bytes of each the sender packs and the receiver unpacks: all but what goes straight from or into
    tensors, if they have their elements in order and the dtype that travels. `hosts` is empty when unknown. With `mailboxes`
    messages pass through memory of the sender's (`channels/ipc.py`).
    """

    messages: Sequence[tuple[int, int, int, int]]
    copied: Sequence[tuple[int, int]]
    sources: int
    destinations: int
    hosts: tuple[int, ...] = ()
    mailboxes: bool = False

    @cached_property
    def pairs(self) -> dict[Pair, int]:
        """Bytes by (sender, receiver)."""
        found: dict[Pair, int] = defaultdict(int)
        for _, sender, receiver, nbytes in self.messages:
            found[sender, receiver] += nbytes
        return dict(found)

    @property
    def staging_bytes(self) -> int:
        """The most that a rank needs: twice what it packs and unpacks of a bucket, and the mailbox of each receiver.

        Tensors that do not have their elements in order take more, and so does `verify: bitwise` for a while: two of the
        largest buckets that come.
        """
        largest: dict[tuple[int, int], int] = defaultdict(int)  # (rank, sends or receives)
        boxes: dict[Pair, int] = defaultdict(int)
        for (_, sender, receiver, nbytes), copied in zip(self.messages, self.copied, strict=True):
            boxes[sender, receiver] = max(boxes[sender, receiver], nbytes)
            for side, rank in enumerate((sender, receiver)):
                largest[rank, side] = max(largest[rank, side], copied[side])
        found: dict[int, int] = defaultdict(int)
        for (rank, _), nbytes in largest.items():
            found[rank] += 2 * nbytes
        if self.mailboxes:
            for (sender, _), nbytes in boxes.items():
                found[sender] += MAILBOX_SLOTS * nbytes
        return max(found.values(), default=0)

    @property
    def rounds(self) -> int:
        """Of the rank that takes part in most of them."""
        found: dict[int, set[int]] = defaultdict(set)
        for number, sender, receiver, _ in self.messages:
            found[sender].add(number)
            found[receiver].add(number)
        return max(map(len, found.values()), default=0)

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
        """Bytes from host to host, a host to itself included."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for (sender, receiver), count in self.pairs.items():
            found[self._host(sender), self._host(receiver)] += count
        return dict(found)

    @property
    def crossing(self) -> int:
        """Bytes that go from one host to another."""
        return sum(count for (first, second), count in self.links.items() if first != second)

    def floor_s(self, speeds: LinkSpeeds) -> float:
        """The least time that the busiest link needs, in seconds: no schedule of this plan is faster."""
        needed: dict[tuple[int, int, bool], float] = defaultdict(float)  # (rank, sends or receives, to another host)
        for pair, count in self.pairs.items():
            crosses = self._crosses(*pair)
            for side, rank in enumerate(pair):
                needed[rank, side, crosses] += speeds.seconds(count, crosses)
        return max(needed.values(), default=0.0)

    def busiest_s(self, speeds: LinkSpeeds) -> float:
        """The least time that the busiest rank needs, in seconds, when it sends one message at a time and receives one."""
        needed: dict[tuple[int, int], float] = defaultdict(float)
        for pair, count in self.pairs.items():
            for side, rank in enumerate(pair):
                needed[rank, side] += speeds.seconds(count, self._crosses(*pair))
        return max(needed.values(), default=0.0)

    def schedule_s(self, speeds: LinkSpeeds) -> float:
        """How long the rounds take, in seconds, where links keep their speed and packing hides behind messages."""
        return simulate(
            (number, sender, receiver, speeds.seconds(nbytes, self._crosses(sender, receiver)))
            for number, sender, receiver, nbytes in self.messages
        )

    def _bytes(self, side: int) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for pair, count in self.pairs.items():
            found[pair[side]] += count
        return found

    def _host(self, rank: int) -> int:
        return self.hosts[rank] if self.hosts else 0

    def _crosses(self, sender: int, receiver: int) -> bool:
        return self._host(sender) != self._host(receiver)

    def __str__(self) -> str:
        return self.text(LinkSpeeds())

    def text(self, speeds: LinkSpeeds) -> str:
        """The plan as printed; pairs beyond the largest `SHOWN_PAIRS` are only counted."""
        lines = [
            f"refit of {_mb(sum(self.received))} from {self.sources} to {self.destinations} ranks, "
            f"{len(self.messages)} buckets, at most {self.rounds} rounds and {_mb(self.staging_bytes)} of staging a rank",
            f"packed by senders: {_mb(sum(packed for packed, _ in self.copied))}, unpacked by receivers: "
            f"{_mb(sum(unpacked for _, unpacked in self.copied))}; the rest goes straight from and into tensors",
            f"sent by a rank: {_spread(self.sent)}; received by a rank: {_spread(self.received)}",
            f"schedule {_seconds(self.schedule_s(speeds))}, floor {_seconds(self.busiest_s(speeds))} of the busiest rank, "
            f"{_seconds(self.floor_s(speeds))} of the busiest link, at {speeds.in_host / 1e9:g} GB/s in a host"
            + (f" and {speeds.between_hosts / 1e9:g} GB/s between hosts" if self.hosts else ""),
        ]
        lines += self._link_lines() if len(set(self.hosts)) > 1 else []
        shown = sorted(sorted(self.pairs.items(), key=lambda item: -item[1])[:SHOWN_PAIRS])
        lines += [f"  {source:>4} -> {to:<4} {_mb(count):>12}" for (source, to), count in shown]
        more = len(self.pairs) - len(shown)
        return "\n".join([*lines, *([f"  and {more} smaller pairs"] if more else [])])

    def _link_lines(self) -> list[str]:
        """What crosses, and the bytes from each host to each other; beyond `SHOWN_PAIRS` they are only counted."""
        crossing = sorted((link, count) for link, count in self.links.items() if link[0] != link[1])
        rows = [
            f"  host {first:>3} -> host {second:<3} {_mb(count):>14}" for (first, second), count in crossing[:SHOWN_PAIRS]
        ]
        more = len(crossing) - len(rows)
        return [self._link_text(), *rows, *([f"  and {more} more links between hosts"] if more else [])]

    def _link_text(self) -> str:
        between = [count for (first, second), count in self.links.items() if first != second]
        inside = sum(self.links.values()) - self.crossing
        return (
            f"{len(set(self.hosts))} hosts: {_mb(self.crossing)} cross between hosts over {len(between)} pairs of them "
            f"({_spread(between or [0])}), {_mb(inside)} stay inside"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.3f} MB"


def _spread(counts: Sequence[int]) -> str:
    mean = sum(counts) / len(counts)
    return f"{_mb(min(counts))} to {_mb(max(counts))}, largest over mean {max(counts) / mean if mean else 1:.3f}"
