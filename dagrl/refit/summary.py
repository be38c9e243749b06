"""A refit plan in numbers: bytes per pair and per link, balance, staging memory, the floor at given link speeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagrl.refit.schedule import Pair

SHOWN_PAIRS = 64


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second and direction of one rank, by default an H200's datasheet: NVLink in a host, NDR between hosts."""

    in_host: float = 450e9
    between_hosts: float = 50e9


@dataclass(frozen=True)
class PlanSummary:
    """Bytes of a plan. `pairs` maps (sender, receiver), as channel ranks, to bytes; `hosts` is empty when unknown."""

    pairs: Mapping[Pair, int]
    sources: int
    destinations: int
    staging_bytes: int
    rounds: int
    buckets: int
    hosts: tuple[int, ...] = ()

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

    @property
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
            crosses = self._host(pair[0]) != self._host(pair[1])
            for side, rank in enumerate(pair):
                needed[rank, side, crosses] += count / (speeds.between_hosts if crosses else speeds.in_host)
        return max(needed.values(), default=0.0)

    def _bytes(self, side: int) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for pair, count in self.pairs.items():
            found[pair[side]] += count
        return found

    def _host(self, rank: int) -> int:
        return self.hosts[rank] if self.hosts else 0

    def __str__(self) -> str:
        return self.text(LinkSpeeds())

    def text(self, speeds: LinkSpeeds) -> str:
        """The plan as printed; pairs beyond the largest `SHOWN_PAIRS` are only counted."""
        lines = [
            f"refit of {_mb(sum(self.received))} from {self.sources} to {self.destinations} ranks, "
            f"{self.buckets} buckets in {self.rounds} rounds, at most {_mb(self.staging_bytes)} of staging a rank",
            f"sent by a rank: {_spread(self.sent)}; received by a rank: {_spread(self.received)}",
            f"floor {_seconds(self.floor_s(speeds))} at {speeds.in_host / 1e9:g} GB/s in a host"
            + (f" and {speeds.between_hosts / 1e9:g} GB/s between hosts" if self.hosts else ""),
        ]
        lines += [self._link_text()] if len(set(self.hosts)) > 1 else []
        shown = sorted(sorted(self.pairs.items(), key=lambda item: -item[1])[:SHOWN_PAIRS])
        lines += [f"  {source:>4} -> {to:<4} {_mb(count):>12}" for (source, to), count in shown]
        more = len(self.pairs) - len(shown)
        return "\n".join([*lines, *([f"  and {more} smaller pairs"] if more else [])])

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
