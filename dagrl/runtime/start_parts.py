"""Seconds of the parts of a worker's start. The driver logs them when a group has started.

class MyWorker:
    def __init__(self, context, config):
        self.start_parts = StartParts()

    def setup(self, address):
        with self.start_parts.part("weights"):
            ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


class StartParts:
    """Seconds by the name of a part, in the order of their ends. A part inside another one is not counted in that."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a part, also if it raises."""
        begin, before = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin - inside


def started_parts(worker: object) -> dict[str, float]:
    """Returns the parts of a worker's start; nothing if its class does not measure them."""
    parts = getattr(worker, "start_parts", None)
    return dict(parts.seconds) if isinstance(parts, StartParts) else {}


def parts_text(total_s: float, ranks: Sequence[Mapping[str, float]]) -> str:
    """Describes a start of `total_s` seconds: each part on its slowest worker, and what no part covers.

    Parts that take longer together than the start have run at the same time. The difference is a negative part, `overlap`.

    Example: `parts_text(10.0, [{"imports": 6.0}, {"imports": 7.0}])` is `10.0 s (imports 7.0, other 3.0)`.
    """
    names = dict.fromkeys(name for parts in ranks for name in parts)
    slowest = {name: max(parts.get(name, 0.0) for parts in ranks) for name in names}
    if not slowest:
        return f"{total_s:.1f} s"
    left = total_s - sum(slowest.values())
    slowest |= {"other": max(0.0, left)} if left > -0.05 else {"overlap": left}
    return f"{total_s:.1f} s ({', '.join(f'{name} {seconds:.1f}' for name, seconds in slowest.items())})"
