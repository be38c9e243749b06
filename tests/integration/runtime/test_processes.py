"""Rings that other processes read, what tracing imports, and memory that a process keeps."""

import ctypes
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

from dagrl.runtime.edges.pickling import dump
from dagrl.runtime.edges.ring import IN_PLACE_BYTES, Ring, RingAddress

SLOT = 1 << 20


def echo(there: RingAddress, back: RingAddress, reader: int, count: int) -> None:
    """Another process: sends back a digest of each message."""
    incoming, outgoing = Ring.open(there), Ring.open(back)
    for _ in range(count):
        value = incoming.read(reader, 120.0)
        digest = float(value.sum()) if isinstance(value, np.ndarray) else value
        writeable = isinstance(value, np.ndarray) and value.flags.writeable
        del value
        outgoing.write(dump((digest, writeable)), 120.0)


def test_messages_of_any_size_reach_every_reader_of_other_processes_in_order() -> None:
    readers, values = 3, [1, b"x" * 100, np.arange(10), np.ones(100_000), {"a": [1, "b"]}, np.arange(50_000), None]
    there = Ring.create(2, SLOT, readers)
    backs = [Ring.create(2, SLOT, 1) for _ in range(readers)]
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=echo, args=(there.address, back.address, reader, len(values)))
        for reader, back in enumerate(backs)
    ]
    for process in processes:
        process.start()
    for value in values:
        there.write(dump(value), 120.0)
        expected = float(value.sum()) if isinstance(value, np.ndarray) else value
        in_place = isinstance(value, np.ndarray) and value.nbytes > IN_PLACE_BYTES
        for back in backs:
            digest, writeable = back.read(0, 120.0)  # type: ignore[misc]
            assert digest == expected
            assert writeable == (isinstance(value, np.ndarray) and not in_place)
    for process in processes:
        process.join(120.0)
        assert process.exitcode == 0


TRACE = """
import sys
from dagrl.runtime.draw import Drawing, mermaid
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Role, methods_of
from dagrl.graphs import phases
from dagrl.refit.connect import refit
from tests.unit.runtime.doubles import Both

layout = ParallelLayout(dp=2, tp=2)
roles = {name: Role(name, layout, methods_of(Both)) for name in ("train", "generation")}
for item in (phases.demonstration_step, phases.train_step, phases.logprobs, phases.generate, refit):
    graph = item.trace(roles, 2)
    buffers = dict.fromkeys((None, *range(len(graph.nodes))), 1)
    assert mermaid([Drawing(graph, dict.fromkeys(graph.widths, layout), buffers)])
heavy = {"ray", "torch", "megatron", "vllm", "transformers"}
sys.stdout.write(str(sorted(heavy & {name.partition(".")[0] for name in sys.modules})))
"""


def test_tracing_and_drawing_import_no_ray() -> None:
    done = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]"


FREED = """
from dagrl.machine import keep_freed_memory
{}
pages = lambda: int(open("/proc/self/statm").read().split()[1])
arrays = [bytes([number]) * 2**20 for number in range(99)]
before = pages()
del arrays
print(before - pages())"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_stays() -> None:
    codes = [FREED.format(call) for call in ("", "keep_freed_memory()")]
    returned, kept = (int(subprocess.check_output([sys.executable, "-c", code], timeout=60)) for code in codes)
    assert returned > 20_000 and kept < 100
