"""Writes the trace of a run: a timeline of the driver and all workers, for https://ui.perfetto.dev or chrome://tracing.

The format is the JSON array of Chrome's Trace Event Format (Google, "Trace Event Format", sections "JSON Array Format",
"Complete Events" and "Metadata Events"). The driver and each worker have a process row, in the order of declaration.

    with TraceWriter(paths.trace) as trace:
        trace.declare(["driver", "train 0 (dp 0, pp 0, tp 0, cp 0)"])
        trace.write([TraceEvent("train_step", "replay", start_ns, duration_ns, "train 0 (...)", "replays")])

Timestamps have the clock and origin of `torch.profiler` (`baseTimeNanoseconds` in its export), so events of both fit on
one time axis.

The closing bracket is written last; viewers do not need it, so a crash loses nothing that was written.
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
MAX_EVENTS = 1_000_000

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

    An existing file, from before a resume, is renamed (`trace.1.json`). Recording stops after `MAX_EVENTS`, because viewers
    cannot open larger files, or if the file cannot be written (a full disk): a broken trace does not end the run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        move_aside(path)
        self.path, self._left = path, MAX_EVENTS
        self._file = path.open("wb", buffering=0)  # so that each call is one write
        with naming(path):
            self._file.write(b"[")
        self._origin_ns = time.time_ns() // _ORIGIN_PERIOD_NS * _ORIGIN_PERIOD_NS
        self._rows: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()
        self._separator = "\n"

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            with suppress(OSError):  # viewers do not need the bracket
                self._file.write(b"\n]\n")
            self._file.close()

    def declare(self, processes: Iterable[str]) -> None:
        """Opens a row for each process, in this order, before its first event."""
        lines: list[dict[str, Json]] = []
        with self._lock:
            for process in processes:
                self._row(lines, process)
            self._append(lines)

    def write(self, events: Iterable[TraceEvent]) -> None:
        """Records events, in any order of time."""
        lines: list[dict[str, Json]] = []
        with self._lock:
            if self._left <= 0:
                return
            for event in events:
                where = {"pid": self._row(lines, event.process), "tid": self._row(lines, event.process, event.thread)}
                start, duration = (event.start_ns - self._origin_ns) / 1000, event.duration_ns / 1000
                times: dict[str, Json] = {"ph": "X", "ts": start, "dur": duration, **where, "args": dict(event.args)}
                lines.append({"name": event.name, "cat": event.category, **times})
                self._left -= 1
            if self._left <= 0:
                logger.warning("the trace %s is full; later events are not recorded", self.path)
            self._append(lines)

    def _row(self, lines: list[dict[str, Json]], process: str, *thread: str) -> int:
        """Returns the number of a process or of its thread. The first use adds lines that name and order its row."""
        if (row := (process, *thread)) not in self._rows:
            number = self._rows[row] = len(self._rows) + 1
            if thread:
                names: dict[str, dict[str, Json]] = {"thread_name": {"name": thread[0]}}
            else:
                names = {"process_name": {"name": process}, "process_sort_index": {"sort_index": number}}
            where = {"pid": self._rows[process,], "tid": number if thread else 0}
            lines += [{"name": name, "ph": "M", **where, "args": args} for name, args in names.items()]
        return self._rows[row]

    def _append(self, lines: Iterable[Mapping[str, Json]]) -> None:
        """Appends lines in one write. If that fails, removes what was written of them and stops recording."""
        content, end = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines), self._file.tell()
        if not content:
            return
        encoded = (self._separator + content).encode()
        try:
            if self._file.write(encoded) != len(encoded):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._separator = ",\n"
        except OSError as error:
            self._left = 0
            logger.warning("cannot write the trace %s: %s; later events are not recorded", self.path, error)
            with suppress(OSError):
                self._file.truncate(end)
                self._file.seek(end)
