"""Where the time goes: seconds in each phase, of one step and of the whole run.

clock = PhaseClock(trace)
with clock.measure("generate"):
    ...
record.log(step, {**metrics, **clock.lap()})     # {"timing_s/generate": 0.8, "timing_s/total": 1.0}
progress.summary(clock.totals, paths)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from dagrl.telemetry.metrics import TIMING
from dagrl.telemetry.trace import TraceWriter


class PhaseClock:
    """Adds up wall time by phase; with a trace, every measured block is also a span on the driver's row.

    `totals` are the seconds of each phase since the clock was made. Measure phases one after the other, not inside each
    other, if their sum should not exceed the wall time. Several threads may measure, each its own phases.
    """

    def __init__(self, trace: TraceWriter | None = None) -> None:
        self.totals: dict[str, float] = {}
        self._lap: dict[str, float] = {}
        self._lap_start = time.perf_counter()
        self._trace = trace

    def restart(self) -> None:
        """Begin the first lap, after what came before the first step."""
        self._lap, self._lap_start = {}, time.perf_counter()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`, also when it raises."""
        start = time.perf_counter()
        current = threading.current_thread()
        thread = "main" if current is threading.main_thread() else current.name
        try:
            with self._trace.span(phase, "step", thread) if self._trace else nullcontext():
                yield
        finally:
            seconds = time.perf_counter() - start
            self.totals[phase] = self.totals.get(phase, 0.0) + seconds
            self._lap[phase] = self._lap.get(phase, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, as metrics `timing_s/<phase>`, and `timing_s/total`, the wall time."""
        now = time.perf_counter()
        timings = {TIMING + phase: seconds for phase, seconds in self._lap.items()}
        timings[TIMING + "total"] = now - self._lap_start
        self._lap, self._lap_start = {}, now
        return timings
