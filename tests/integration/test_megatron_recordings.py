"""Who holds the CUDA graphs of passes, and until when. A double stands for them: what they compute is tested on GPUs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from bench.train_inputs import single_worker
from dagrl.errors import RunError
from tests.integration import megatron_reference as reference
from tests.integration.megatron_worker import TestedWorker

pytest.importorskip("megatron.core")


class GraphDouble:
    """Instead of `torch.cuda.CUDAGraph`: replays launch nothing, and `while_it_runs` is what another thread does then."""

    alive: ClassVar[weakref.WeakSet[GraphDouble]] = weakref.WeakSet()
    replays: ClassVar[int] = 0
    while_it_runs: ClassVar[Callable[[], None] | None] = None

    def __init__(self) -> None:
        self.alive.add(self)

    def reset(self) -> None:
        self.alive.discard(self)

    def replay(self) -> None:
        GraphDouble.replays += 1
        if GraphDouble.while_it_runs is not None:
            GraphDouble.while_it_runs()


@pytest.fixture
def worker(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[TestedWorker]:
    """Its passes are recorded as a GPU's are, but for the device."""
    from workers.megatron import cuda_graphs

    monkeypatch.setattr("torch.cuda.CUDAGraph", GraphDouble)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "_recorded", lambda graph, pool: nullcontext())
    monkeypatch.setattr(GraphDouble, "replays", 0)
    monkeypatch.setattr(GraphDouble, "while_it_runs", None)
    with single_worker(reference.make_config(tiny_models["qwen3"]), TestedWorker) as made:
        trainer = made._ready()
        trainer.way = cuda_graphs.RecordedPasses(list(trainer.model.parameters().values()), trainer.gradient_tensors())
        yield made
    assert not GraphDouble.alive


def run(worker: TestedWorker, times: int = 1) -> None:
    for _ in range(times):
        worker.logprobs(reference.make_batch())
        worker.train_step(reference.make_batch(), "sft")


def test_an_abort_leaves_no_graph_that_refers_to_a_communicator(worker: TestedWorker) -> None:
    """Not the worker's own ones, and none that a step left behind in cycles: NCCL's abort waits for all of them."""
    gc.disable()
    try:
        run(worker, 3)
        assert GraphDouble.replays and worker.recordings() == len(GraphDouble.alive) - worker.recordings() // 2
        worker.abort()
        assert not GraphDouble.alive
    finally:
        gc.enable()


def test_an_abort_while_a_pass_waits_for_a_peer_frees_its_graphs_at_once(worker: TestedWorker) -> None:
    """The step that waits, its traceback and autograd refer to the pass: they do not keep what the abort waits for."""
    run(worker, 2)
    left = []

    def abort() -> None:
        GraphDouble.while_it_runs = None
        worker._ready().forget_recordings()
        left.append(len(GraphDouble.alive))

    GraphDouble.while_it_runs = abort
    with pytest.raises(RunError, match="were dropped while it ran"):
        worker.train_step(reference.make_batch(), "sft")
    assert left == [1]  # the one that runs
    assert not GraphDouble.alive
    run(worker, 2)  # an offload forgets as well, and the worker goes on
    assert worker.recordings() >= 2


def test_a_recording_that_fails_leaves_no_graph_while_its_error_is_told(
    worker: TestedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime aborts while it handles the error, whose traceback refers to the recording."""

    begun = []

    def recorded(graph: GraphDouble, pool: None) -> nullcontext[None]:
        begun.append(graph)
        if len(begun) == 2:
            raise torch.OutOfMemoryError("while the way back is recorded")
        return nullcontext()

    monkeypatch.setattr("workers.megatron.cuda_graphs._recorded", recorded)
    try:
        for _ in range(2):
            worker.train_step(reference.make_batch(), "sft")
    except torch.OutOfMemoryError:
        assert not GraphDouble.alive
    else:
        pytest.fail("nothing was recorded")


def test_a_recording_keeps_the_buffers_that_megatron_gathers_into(worker: TestedWorker) -> None:
    """Megatron drops its buffer for a larger one, and graphs go on writing to the address that they were recorded with."""
    from megatron.core.parallel_state import get_global_memory_buffer

    buffers = get_global_memory_buffer().buffer
    buffers["mpu", torch.float32] = torch.empty(8)
    dropped = weakref.ref(buffers["mpu", torch.float32])
    run(worker, 2)
    buffers["mpu", torch.float32] = torch.empty(16)
    assert dropped() is not None
    worker.abort()
    assert dropped() is None


def test_graphs_that_were_not_used_for_long_are_dropped(worker: TestedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.megatron.cuda_graphs.MOST_RECORDINGS", 1)
    run(worker, 3)
    assert worker.recordings() <= 1
