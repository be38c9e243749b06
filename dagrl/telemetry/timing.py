"""Measures the seconds of each phase, per step and over the run.

clock = PhaseClock(trace)
with clock.measure("generate"):
    ...
record.log(step, stage, {**metrics, **clock.close_step()})     # {"timing_s/generate": 0.8, "timing_s/total": 1.0}
progress.summary(clock.totals, paths)
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dagrl.telemetry.metrics import TIMING
from dagrl.telemetry.trace import TraceEvent, TraceWriter


class PhaseClock:
    """Adds up wall time by phase. With a trace, each measured block is also a span on the driver's row.

    `totals` are the seconds of each phase since the clock was created or restarted. Phases measured inside each other
    count twice. Several threads may measure, each its own phases.
    """

    def __init__(self, trace: TraceWriter | None = None) -> None:
        self.totals: dict[str, float] = {}
        self._step: dict[str, float] = {}
        self._step_start = time.perf_counter()
        self._trace = trace

    def restart(self) -> None:
        """Discards all times: what came before the first step."""
        self.totals = {}
        self._step, self._step_start = {}, time.perf_counter()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to `phase`, even if it raises."""
        start, start_ns = time.perf_counter(), time.time_ns()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if self._trace is not None:
                current = threading.current_thread()
                thread = "main" if current is threading.main_thread() else current.name
                self._trace.write([TraceEvent(phase, "step", start_ns, time.time_ns() - start_ns, thread=thread)])
            self.totals[phase] = self.totals.get(phase, 0.0) + seconds
            self._step[phase] = self._step.get(phase, 0.0) + seconds

    def close_step(self) -> dict[str, float]:
        """Ends the step. Returns its seconds per phase as `timing_s/<phase>`, and its wall time as `timing_s/total`."""
        now = time.perf_counter()
        timings = {TIMING + phase: seconds for phase, seconds in self._step.items()}
        timings[TIMING + "total"] = now - self._step_start
        self._step, self._step_start = {}, now
        return timings
