"""Ranges on a GPU: kernels lie inside the range of the node that launched them, on one clock with the trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dagrl.runtime.annotate import enable_ranges
from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.executors.node import NodeCall, Take, drain_runs, install, run_node
from dagrl.telemetry.trace import TraceEvent, TraceWriter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CALL = NodeCall("train", "train[0].multiply", 0, "map", "multiply", (Take(0),), {}, 0, True, 1 << 20, "")
ALLOWED_US = 2000.0


class Worker:
    def multiply(self, size: int) -> float:
        matrix = torch.ones(size, size, device="cuda")
        return float((matrix @ matrix).sum())


@pytest.fixture(autouse=True)
def ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.runtime.annotate._enabled", False)  # again, after the test
    enable_ranges()


def test_kernels_lie_inside_the_nodes_range(tmp_path: Path) -> None:
    worker = Worker()
    install(worker, "train", 0, "dp 0")
    worker.multiply(2048)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run_node(worker, CALL, Packet(Header("train_step", 7, False, {"train": 0}, 10.0), 2048))
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    (run,) = drain_runs(worker, "train")
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.write([TraceEvent(run.label, "replay", run.start_ns, run.end_ns - run.start_ns, "train 0")])
    (ours,) = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    events = json.loads((tmp_path / "torch.json").read_text())["traceEvents"]
    (twin,) = [e for e in events if e.get("name") == "train_step #7 train[0].multiply" and e["cat"] == "user_annotation"]
    assert ours["ts"] == pytest.approx(twin["ts"], abs=ALLOWED_US)
    assert ours["dur"] == pytest.approx(twin["dur"], abs=ALLOWED_US)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels
    for kernel in kernels:
        assert ours["ts"] - ALLOWED_US < kernel["ts"] < ours["ts"] + ours["dur"] + ALLOWED_US


def test_nvtx_gets_a_range_of_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own functions, which are called as ever."""
    calls: list[str] = []
    push: Callable[[str], int] = torch.cuda.nvtx.range_push
    pop: Callable[[], int] = torch.cuda.nvtx.range_pop

    def noted_push(name: str) -> int:
        calls.append(name)
        return push(name)

    def noted_pop() -> int:
        calls.append("pop")
        return pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", noted_push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", noted_pop)
    worker = Worker()
    install(worker, "train", 0, "dp 0")
    for replay in range(2):
        run_node(worker, CALL, Packet(Header("train_step", replay, False, {"train": replay}, 10.0), 64))
    assert calls == ["train_step #0 train[0].multiply", "pop", "train_step #1 train[0].multiply", "pop"]
