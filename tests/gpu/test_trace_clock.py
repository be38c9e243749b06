"""The trace on a GPU: kernels lie inside the run of the node that launched them, on one clock with torch.profiler."""

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dagrl.runtime.edges.packet import Header, Packet
from dagrl.runtime.executors.node import NodeCall, Take, drain_runs, install, run_node
from dagrl.telemetry.trace import TraceEvent, TraceWriter

CALL = NodeCall("train", "train[0].multiply", 0, "map", "multiply", (Take(0),), {}, 0, True, 1 << 20, "")
ALLOWED_US = 2000.0


class Worker:
    def multiply(self, size: int) -> float:
        matrix = torch.ones(size, size, device="cuda")
        return float((matrix @ matrix).sum())


def test_kernels_lie_inside_the_nodes_run(tmp_path: Path) -> None:
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
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels
    for kernel in kernels:
        assert ours["ts"] - ALLOWED_US < kernel["ts"] < ours["ts"] + ours["dur"] + ALLOWED_US
