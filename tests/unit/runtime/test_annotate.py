"""Ranges for profilers: `torch.profiler` sees a node's run when the trace says it ran, on the same clock."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dagrl.runtime.annotate import annotate, enable_ranges
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.executors.node import NodeCall, Take, drain_runs, install, run_node
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.trace import TraceEvent, TraceWriter

CALL = NodeCall("train", "train[0].step", 0, "map", "step", (Take(0),), {}, 0, True, 1 << 20, "")
BATCH = Batch({"tokens": np.zeros((4, 16), np.int64), "lengths": np.full(4, 16)})
CLOCKS_US = 1000.0  # the profiler computes its times from the processor's counter


class Worker:
    def step(self, batch: Batch) -> int:
        time.sleep(0.02)
        return batch.rows


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.runtime.annotate._enabled", False)  # again, after the test
    enable_ranges()


def profiled(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """torch.profiler's export of two replays of a node, and the trace's events of the same."""
    worker = Worker()
    install(worker, "train", 0, "dp 0")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for replay in range(2):
            run_node(worker, CALL, Packet(Header("train_step", replay, False, {"train": replay}, 10.0), BATCH))
    profiler.export_chrome_trace(str(path / "torch.json"))
    with TraceWriter(path / "trace.json") as trace:
        trace.write(
            TraceEvent(run.label, "replay", run.start_ns, run.end_ns - run.start_ns, "train 0")
            for run in drain_runs(worker, "train")
        )
    events = json.loads((path / "trace.json").read_text())
    return json.loads((path / "torch.json").read_text()), [event for event in events if event["ph"] == "X"]


def test_both_traces_name_the_same_interval(ranges: None, tmp_path: Path) -> None:
    """The range is within the run, whose clock readings surround it, however far apart a busy machine makes them."""
    theirs, ours = profiled(tmp_path)
    named = {event["name"]: event for event in theirs["traceEvents"] if event.get("ph") == "X"}
    for replay, event in enumerate(ours):
        twin = named[f"train_step #{replay} train[0].step [4 x 16]"]
        assert event["ts"] <= twin["ts"] + CLOCKS_US
        assert twin["ts"] + twin["dur"] <= event["ts"] + event["dur"] + CLOCKS_US
        assert twin["dur"] >= 20_000 - CLOCKS_US


@pytest.fixture
def nvtx(ranges: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a machine with CUDA would tell NVTX."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


def test_nvtx_ranges_are_named_by_phase_replay_and_bucket_and_end(nvtx: list[str]) -> None:
    worker = Worker()
    install(worker, "train", 0, "dp 0")
    run_node(worker, CALL, Packet(Header("train_step", 7, False, {"train": 0}, 10.0), BATCH))
    with pytest.raises(RuntimeError), annotate("outer"), annotate("inner"):
        raise RuntimeError
    assert nvtx == ["push train_step #7 train[0].step [4 x 16]", "pop", "push outer", "push inner", "pop", "pop"]


def test_nothing_is_recorded_unless_enabled(tmp_path: Path) -> None:
    theirs, ours = profiled(tmp_path)
    assert len(ours) == 2
    assert not [event for event in theirs["traceEvents"] if "train_step" in str(event.get("name"))]
    assert annotate("one") is annotate("another")  # the one empty context
