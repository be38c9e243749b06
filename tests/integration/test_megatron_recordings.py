"""Lifetime of the passes' CUDA graphs, with a test double. GPU tests check their results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from dagrl.bench.train_inputs import single_worker
from dagrl.errors import RunError
from tests.integration import megatron_reference as reference
from tests.integration.megatron_worker import TestedWorker

pytest.importorskip("megatron.core")


class GraphDouble:
    """Double of `torch.cuda.CUDAGraph`: replays launch nothing and call `while_it_runs`, which acts as another thread."""

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
    """Records passes as on a GPU, except for the device."""
    from dagrl.workers.megatron import cuda_graphs

    monkeypatch.setattr("torch.cuda.CUDAGraph", GraphDouble)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "_recorded", lambda graph, pool: nullcontext())
    monkeypatch.setattr(GraphDouble, "replays", 0)
    monkeypatch.setattr(GraphDouble, "while_it_runs", None)
    with single_worker(reference.make_config(tiny_models["qwen3"]), TestedWorker) as made:
        trainer = made._ready()
        trainer.model_pass = cuda_graphs.RecordedPasses(
            list(trainer.model.parameters().values()), trainer.gradient_tensors()
        )
        yield made
    assert not GraphDouble.alive


def run(worker: TestedWorker, times: int = 1) -> None:
    for _ in range(times):
        worker.logprobs(reference.make_batch())
        worker.train_step(reference.make_batch(), "likelihood")


def test_an_abort_leaves_no_graph_that_refers_to_a_communicator(worker: TestedWorker) -> None:
    """Neither the worker nor reference cycles of a step keep graphs: NCCL's abort waits for all of them."""
    gc.disable()
    try:
        run(worker, 3)
        assert GraphDouble.replays and worker.recordings() == len(GraphDouble.alive) - worker.recordings() // 2
        worker.abort()
        assert not GraphDouble.alive
    finally:
        gc.enable()


def test_an_abort_frees_the_graphs_of_a_waiting_pass_at_once(worker: TestedWorker) -> None:
    """The waiting step, its traceback and autograd refer to the pass, but do not keep its graphs alive."""
    run(worker, 2)
    left = []

    def abort() -> None:
        GraphDouble.while_it_runs = None
        worker._ready().forget_recordings()
        left.append(len(GraphDouble.alive))

    GraphDouble.while_it_runs = abort
    with pytest.raises(RunError, match="dropped the CUDA graphs of this pass"):
        worker.train_step(reference.make_batch(), "likelihood")
    assert left == [1]  # the one that runs
    assert not GraphDouble.alive
    run(worker, 2)  # an offload drops graphs too, and the worker continues
    assert worker.recordings() >= 2


def test_a_failed_recording_leaves_no_graph(worker: TestedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime aborts while handling the error, whose traceback refers to the recording."""

    begun = []

    def recorded(graph: GraphDouble, pool: None) -> nullcontext[None]:
        begun.append(graph)
        if len(begun) == 2:
            raise torch.OutOfMemoryError("while recording the backward pass")
        return nullcontext()

    monkeypatch.setattr("dagrl.workers.megatron.cuda_graphs._recorded", recorded)
    try:
        for _ in range(2):
            worker.train_step(reference.make_batch(), "likelihood")
    except torch.OutOfMemoryError:
        assert not GraphDouble.alive
    else:
        pytest.fail("nothing was recorded")


def test_a_recording_keeps_the_buffers_that_megatron_gathers_into(worker: TestedWorker) -> None:
    """Megatron replaces its buffer by a larger one, while graphs still write to the recorded address."""
    from megatron.core.parallel_state import get_global_memory_buffer

    buffers = get_global_memory_buffer().buffer
    buffers["mpu", torch.float32] = torch.empty(8)
    dropped = weakref.ref(buffers["mpu", torch.float32])
    run(worker, 2)
    buffers["mpu", torch.float32] = torch.empty(16)
    assert dropped() is not None
    worker.abort()
    assert dropped() is None


def test_least_recently_used_graphs_are_dropped(worker: TestedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.workers.megatron.cuda_graphs.MOST_RECORDINGS", 1)
    run(worker, 3)
    assert worker.recordings() <= 1
