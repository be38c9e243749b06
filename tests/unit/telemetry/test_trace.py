"""Trace files: valid JSON, or without the last bracket after a crash; named rows and bounded memory."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import TraceEvent, TraceWriter
from tests.unit.run.saving import full_disk

NAMES = ("process_name", "process_sort_index", "thread_name")


def events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    """Returns the events of a file. While a run writes it, the closing bracket is missing."""
    text = path.read_text()
    return [event for event in json.loads(text if text.endswith("]\n") else text + "]") if event["ph"] == kind]


def test_rows_and_times(tmp_path: Path) -> None:
    path, about = tmp_path / "run" / "trace.json", {"replay": 3, "warmup": False}
    with TraceWriter(path) as trace:
        trace.declare(["driver", "train 0", "train 1"])
        start = time.time_ns() // 1000 * 1000
        step = TraceEvent("train_step", "replay", start + 2_500, 1_250, "train 1", "replays", about)
        quantum = TraceEvent("generate", "replay", start + 9_000, 4_000, "generation 0", "replays")
        trace.write([step, quantum, TraceEvent("checkpoint", "step", start, 1_000)])
    named = {kind: [event for event in events(path, "M") if event["name"] == kind] for kind in NAMES}
    names = {event["pid"]: event["args"]["name"] for event in named["process_name"]}
    order = {event["pid"]: event["args"]["sort_index"] for event in named["process_sort_index"]}
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)] == ["driver", "train 0", "train 1", "generation 0"]
    first, second, third = events(path)
    assert (first["name"], first["cat"], first["dur"]) == ("train_step", "replay", 1.25)
    assert (first["ts"] - third["ts"], second["ts"] - third["ts"]) == (2.5, 9.0)
    assert first["args"] == about
    assert [names[event["pid"]] for event in (first, second, third)] == ["train 1", "generation 0", "driver"]
    threads = {event["tid"]: (event["pid"], event["args"]["name"]) for event in named["thread_name"]}
    assert threads[first["tid"]] == (first["pid"], "replays")
    assert threads[third["tid"]] == (third["pid"], "main")


def test_the_file_is_complete_after_every_write(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        for number in range(1, 20):  # read while open, as after a crash
            trace.write([TraceEvent("event", "test", number, 1)])
            assert len(events(trace.path)) == number
    assert len(events(trace.path)) == 19


def test_recording_stops_at_the_limit(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.telemetry.trace.MAX_EVENTS", 3)
    with TraceWriter(tmp_path / "trace.json") as trace:
        for number in range(6):
            trace.write([TraceEvent("event", "test", number, 1)])
    assert len(events(trace.path)) == 3
    (message,) = (record.message for record in caplog.records if record.name == "dagrl.telemetry.trace")
    assert message == f"the trace {trace.path} is full; later events are not recorded"


@pytest.mark.parametrize("room", [0, 150])
def test_a_full_disk_ends_only_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int) -> None:
    """While the disk is full, part of the events fits, or none."""
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.write([TraceEvent("kept", "test", 0, 1)])
        with full_disk(trace.path.stat().st_size + room):
            trace.write([TraceEvent("lost", "test", number, 1) for number in range(100)])
        trace.write([TraceEvent("later", "test", 0, 1)])
    assert [event["name"] for event in events(trace.path)] == ["kept"]
    (message,) = (record.message for record in caplog.records if record.name == "dagrl.telemetry.trace")
    assert message.startswith(f"cannot write the trace {trace.path}: ")


def test_traces_before_a_resume_are_kept(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        with TraceWriter(tmp_path / "trace.json") as trace:
            trace.write([TraceEvent(name, "test", 0, 1)])
    actual = {path.name: events(path)[0]["name"] for path in tmp_path.iterdir()}
    assert actual == {"trace.1.json": "first", "trace.2.json": "second", "trace.json": "third"}


def test_threads_may_write_concurrently(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:

        def work(worker: int) -> None:
            for number in range(200):
                trace.write([TraceEvent("event", "test", number, 1, f"worker {worker}")])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    assert len(events(trace.path)) == 800


def test_clock_measures_phases_and_writes_spans(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        clock = PhaseClock(trace)
        with clock.measure("compile"):
            time.sleep(0.01)
        began = time.perf_counter()
        clock.restart()
        with clock.measure("generate"):
            pass
        first, took = clock.close_step(), time.perf_counter() - began
        with pytest.raises(RuntimeError), clock.measure("generate"):
            raise RuntimeError("a failed phase counts too")
        second = clock.close_step()
    assert set(first) == set(second) == {"timing_s/generate", "timing_s/total"}
    assert took >= first["timing_s/total"] >= first["timing_s/generate"] > 0
    assert clock.totals["generate"] == pytest.approx(first["timing_s/generate"] + second["timing_s/generate"])
    assert [event["name"] for event in events(trace.path)] == ["compile", "generate", "generate"]
