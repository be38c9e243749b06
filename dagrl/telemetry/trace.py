"""Writes the trace of a run: a timeline of the driver and all workers, for https://ui.perfetto.dev or chrome://tracing.

The format is the JSON array of Chrome's Trace Event Format (Google, "Trace Event Format", sections "JSON Array Format",
"Complete Events" and "Metadata Events"). The driver and each worker have a process row, in the order of declaration.

    with TraceWriter(paths.trace) as trace:
        trace.declare(["driver", "train 0 (dp 0, pp 0, tp 0, cp 0)"])
        trace.write([TraceEvent("train_step", "replay", start_ns, duration_ns, "train 0 (...)", "replays")])

Timestamps have the clock and origin of `torch.profiler` (`baseTimeNanoseconds` in its export), so events of both fit on
one time axis.

The closing bracket is written last; viewers do not need it, so a crash loses only the last events. Memory holds only these
and the labels.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dagrl.config import Json
from dagrl.files import move_aside, naming

logger = logging.getLogger(__name__)

DRIVER = "driver"

_ORIGIN_PERIOD_NS = 3 * 2_629_746 * 10**9
"""Kineto's origin is the last multiple of three months since the epoch, each a twelfth of a Gregorian year. Microseconds
since the epoch itself would lose digits in a JavaScript number (libkineto, output_json.cpp, `ChromeTraceBaseTime`)."""


@dataclass(frozen=True)
class TraceEvent:
    """A span of time on one thread of one process.

    `start_ns` is nanoseconds since the epoch (`time.time_ns()`, the clock that processes share). `process` and `thread` are
    labels; each new label opens a row.
    """

    name: str
    category: str
    start_ns: int
    duration_ns: int
    process: str = DRIVER
    thread: str = "main"
    args: Mapping[str, Json] = field(default_factory=dict)


class TraceWriter:
    """Writes a trace file during the run. Thread-safe.

    An existing file, from before a resume, is renamed (`trace.1.json`). Events are flushed after `buffered_events` events or
    `flush_s` seconds. Recording stops after `max_events`, because viewers cannot open larger files, or if the file cannot be
    written (a full disk): a broken trace does not end the run.
    """

    def __init__(self, path: Path, *, buffered_events: int = 512, flush_s: float = 2.0, max_events: int = 1_000_000) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        move_aside(path)
        self.path = path
        self._file = path.open("wb", buffering=0)  # so that a flush is one write
        with naming(path):
            self._file.write(b"[")
        self._origin_ns = time.time_ns() // _ORIGIN_PERIOD_NS * _ORIGIN_PERIOD_NS
        self._rows: dict[tuple[str, str | None], int] = {}
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._buffered_events, self._flush_s, self._max_events = buffered_events, flush_s, max_events
        self._recorded = 0
        self._separator = "\n"
        self._flushed_at = time.monotonic()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._flush()
            with suppress(OSError):  # viewers do not need the bracket
                self._file.write(b"\n]\n")
            self._file.close()

    def declare(self, processes: Iterable[str]) -> None:
        """Opens a row for each process, in this order, before its first event."""
        with self._lock:
            for process in processes:
                self._process(process)

    def write(self, events: Iterable[TraceEvent]) -> None:
        """Records events, in any order of time."""
        with self._lock:
            for event in events:
                if self._recorded == self._max_events:
                    logger.warning("the trace %s has %d events; later ones are not recorded", self.path, self._max_events)
                elif self._recorded < self._max_events:
                    self._line(
                        {
                            "name": event.name,
                            "cat": event.category,
                            "ph": "X",
                            "ts": (event.start_ns - self._origin_ns) / 1000,
                            "dur": event.duration_ns / 1000,
                            "pid": self._process(event.process),
                            "tid": self._thread(event.process, event.thread),
                            "args": dict(event.args),
                        }
                    )
                self._recorded += 1
            if len(self._lines) >= self._buffered_events or time.monotonic() - self._flushed_at > self._flush_s:
                self._flush()

    def _process(self, process: str) -> int:
        """Returns the process's number. Its first use names and orders its row."""
        if (number := self._rows.get((process, None))) is None:
            number = self._rows[process, None] = len(self._rows) + 1
            self._metadata("process_name", number, 0, {"name": process})
            self._metadata("process_sort_index", number, 0, {"sort_index": number})
        return number

    def _thread(self, process: str, thread: str) -> int:
        if (number := self._rows.get((process, thread))) is None:
            number = self._rows[process, thread] = len(self._rows) + 1
            self._metadata("thread_name", self._process(process), number, {"name": thread})
        return number

    def _metadata(self, name: str, process: int, thread: int, args: dict[str, Json]) -> None:
        self._line({"name": name, "ph": "M", "pid": process, "tid": thread, "args": args})

    def _line(self, content: dict[str, Json]) -> None:
        self._lines.append(json.dumps(content, separators=(",", ":")))

    def _flush(self) -> None:
        """Appends the new events in one write. If that fails, removes what was written of them and stops recording."""
        self._flushed_at = time.monotonic()
        if not self._lines:
            return
        content, end = (self._separator + ",\n".join(self._lines)).encode(), self._file.tell()
        self._lines.clear()
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._separator = ",\n"
        except OSError as error:
            self._max_events = -1
            logger.warning("cannot write the trace %s: %s; later events are not recorded", self.path, error)
            with suppress(OSError):
                self._file.truncate(end)
                self._file.seek(end)
