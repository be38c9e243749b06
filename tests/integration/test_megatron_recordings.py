"""Lifetime of the passes' CUDA graphs, with a test double. GPU tests check their results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dagrl.errors import RunError
from dagrl.runtime.worker import ReplayContext, replay_context
from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.test_train_routing import recorded_batch
from tests.integration.train_cases import UNCLIPPED
from tests.integration.train_workers import TestedMegatronWorker, single_worker

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
def worker(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[TestedMegatronWorker]:
    """Records passes as on a GPU, except for the device."""
    from dagrl.workers.megatron import cuda_graphs

    monkeypatch.setattr("torch.cuda.CUDAGraph", GraphDouble)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "_recorded", lambda graph, pool: nullcontext())
    monkeypatch.setattr(GraphDouble, "replays", 0)
    monkeypatch.setattr(GraphDouble, "while_it_runs", None)
    with single_worker(reference.make_config(tiny_models["qwen3"]), TestedMegatronWorker) as made:
        trainer = made.megatron().trainer
        trainer.model_pass = cuda_graphs.RecordedPasses(
            list(trainer.model.parameters().values()), trainer.state("gradients")
        )
        yield made
    assert not GraphDouble.alive


def run(worker: TestedMegatronWorker, times: int = 1) -> None:
    for _ in range(times):
        worker.logprobs(reference.make_batch())
        worker.train_step(reference.make_batch(), "likelihood")


def test_an_abort_leaves_no_graph_that_refers_to_a_communicator(worker: TestedMegatronWorker) -> None:
    """Neither the worker nor reference cycles of a step keep graphs: NCCL's abort waits for all of them."""
    gc.disable()
    try:
        run(worker, 3)
        assert GraphDouble.replays and worker.recordings() == len(GraphDouble.alive) - worker.recordings() // 2
        worker.abort()
        assert not GraphDouble.alive
    finally:
        gc.enable()


def test_an_abort_frees_the_graphs_of_a_waiting_pass_at_once(worker: TestedMegatronWorker) -> None:
    """The waiting step, its traceback and autograd refer to the pass, but do not keep its graphs alive."""
    run(worker, 2)
    left = []

    def abort() -> None:
        GraphDouble.while_it_runs = None
        worker.megatron().trainer.forget_recordings()
        left.append(len(GraphDouble.alive))

    GraphDouble.while_it_runs = abort
    with pytest.raises(RunError, match="dropped the CUDA graphs of this pass"):
        worker.train_step(reference.make_batch(), "likelihood")
    assert left == [1]  # the one that runs
    assert not GraphDouble.alive
    run(worker, 2)  # an offload drops graphs too, and the worker continues
    assert worker.recordings() >= 2


def test_a_failed_recording_leaves_no_graph(worker: TestedMegatronWorker, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_recording_keeps_the_buffers_that_megatron_gathers_into(worker: TestedMegatronWorker) -> None:
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


def test_least_recently_used_graphs_are_dropped(worker: TestedMegatronWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.workers.megatron.cuda_graphs.MOST_RECORDINGS", 1)
    run(worker, 3)
    assert worker.recordings() <= 1


class RecordedOps(TorchDispatchMode):
    """Double of `torch.cuda.CUDAGraph` on a CPU: replays the recorded operations on the recorded memory.

    Unlike a GPU it also computes while it records, so that only a warm-up may record.
    """

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)  # the host waits for the device

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        assert operation not in self.READS
        found = operation(*args, **(named or {}))
        if operation.namespace != "c10d":  # those of one worker change nothing
            self.calls.append((operation, args, named or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, named, recorded in self.calls:
            for there, here in zip(tree_leaves(operation(*args, **named)), tree_leaves(recorded), strict=True):
                if there.data_ptr() != here.data_ptr():
                    here.copy_(there)


@pytest.mark.parametrize(("model", "dense"), [pytest.param("qwen3_moe_mixed", 1, marks=pytest.mark.slow), ("glm4_moe", 0)])
def test_steps_of_recorded_experts_match_plain_ones(
    model: str, dense: int, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of several sizes with a record of experts, after a warm-up that recorded all passes."""
    from dagrl.workers.megatron import cuda_graphs, experts

    monkeypatch.setattr("torch.cuda.CUDAGraph", RecordedOps)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "_recorded", lambda graph, pool: graph)
    monkeypatch.setattr(experts, "row_offsets", lambda tokens, rows: tokens.cumsum(0, dtype=torch.int32))  # as on a GPU
    megatron = {"moe_aux_loss_coeff": 0.1}
    keys = {"router_replay": True, "megatron_cfg": megatron, "optimizer": UNCLIPPED}
    config = reference.make_config(tiny_models[model], **keys)
    recorded = config.policy.megatron_cfg.model_copy(update={"cuda_graphs": True})
    policy = config.policy.model_copy(update={"megatron_cfg": recorded})
    batch = recorded_batch(reference.make_batch().select(range(4)).with_scalars(lr=0.0), 4, 4, 2, dense)[0]
    found: list[list[Any]] = []
    for graphs in (False, True):
        found.append([])
        with single_worker(config, TestedMegatronWorker) as made:
            if graphs:
                made.config, trainer = config.model_copy(update={"policy": policy}), made.megatron().trainer
                trainer.model_pass = cuda_graphs.RecordedPasses(
                    list(trainer.model.weights().values()), trainer.state("gradients")
                )
                with replay_context(ReplayContext("train_step", 0, True)):
                    made.train_step(batch, "likelihood")
                with replay_context(ReplayContext("logprobs", 0, True)):
                    made.logprobs(batch)
                assert made.recordings() == 2
            for one in (batch.select([1, 2, 3]), batch):
                rows = made.logprobs(one)
                metrics = merge_step_metrics([made.train_step(one, "likelihood")]).flat()
                figures = {key: value for key, value in metrics.items() if not key.startswith("perf/")}
                found[-1].append((rows["logprobs"], figures, reference.assemble([made.gradients()])))
            assert not graphs or made.recordings() == 2
    for (rows, figures, gradients), (expected_rows, expected, expected_gradients) in zip(*reversed(found), strict=True):
        np.testing.assert_allclose(rows, expected_rows, atol=1e-5, rtol=0)
        assert figures == pytest.approx(expected, rel=1e-5, abs=1e-6) and figures["moe/replayed_tokens"] > 0
        reference.assert_gradients(gradients, expected_gradients, 2e-5)
