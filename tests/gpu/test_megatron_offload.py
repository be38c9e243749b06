"""Train state offloaded and back: memory is freed, values are bit-identical, log-probabilities need less memory."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dagrl.bench.models import SHAPES, ModelShape, write_model
from dagrl.config import Config
from dagrl.runtime.shapes import Batch
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.train import checkpoint
from dagrl.workers.train.checkpoint import StagingBuffers
from dagrl.workers.train.offload import StatePart
from tests.integration.train_workers import single_worker, train_batch

pytest.importorskip("megatron.core")

PARTS: tuple[StatePart, ...] = ("weights", "gradients", "optimizer")
SLACK = 256 << 20  # bytes that workspaces and rounding may take


@pytest.fixture(scope="module", params=[False, True], ids=["replicated", "sharded"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronWorker]:
    """Realistic widths, four layers, a smaller vocabulary: about 80 million weights, 0.9 GiB of optimizer state."""
    shape = ModelShape("small", {**SHAPES["qwen3-0.6b"].with_layers(4).config, "vocab_size": VOCABULARY})
    model = write_model(shape, tmp_path_factory.mktemp("model"))
    policy = {
        "model_name": str(model),
        "precision": "bfloat16",
        "train_micro_batch_size": 2,
        "logprob_batch_size": 1,
        "megatron_cfg": {"use_distributed_optimizer": request.param},
    }
    torch._C._cuda_clearCublasWorkspaces()  # those of workers that other tests had in this process
    config = Config.model_validate({"name": "t", "algorithm": "sft", "data": {}, "policy": policy})
    with single_worker(config, MegatronWorker) as worker:
        worker.train_step(BATCH, "likelihood")
        yield worker


@pytest.fixture(autouse=True)
def all_here(worker: MegatronWorker) -> Iterator[None]:
    """Keeps a failing test from affecting the next."""
    yield
    worker.reload(PARTS)


VOCABULARY = 16384
BATCH = train_batch(4, 512, VOCABULARY)


def held(worker: MegatronWorker) -> list[torch.Tensor]:
    trainer = worker.backend().model
    return [tensor.clone() for tensor in (*trainer.state("weights"), *trainer.state("optimizer"))]


def runs_within(worker: MegatronWorker, rows: Batch, limit: int) -> bool:
    """Returns whether log-probabilities run within `limit` bytes of GPU memory."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        worker.logprobs(rows)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_is_freed_and_values_return_bit_for_bit(worker: MegatronWorker) -> None:
    offloader = worker.offloader
    expected = [tensor.cpu() for tensor in held(worker)]
    sizes = {part: offloader.nbytes(part) for part in PARTS}
    torch.cuda.empty_cache()
    for number in range(2):  # the second time into the same host memory
        before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        worker.offload(PARTS)
        assert before - torch.cuda.memory_allocated() > sum(sizes.values()) - SLACK, number
        assert torch.cuda.mem_get_info()[0] - free > sum(sizes.values()) - SLACK  # for other processes too
        assert torch.cuda.memory_allocated() < SLACK
        worker.reload(PARTS)
        for found, value in zip(held(worker), expected, strict=True):
            assert torch.equal(found.cpu(), value)
    assert np.isfinite(worker.train_step(BATCH, "likelihood").flat()["loss"])


def test_log_probabilities_are_equal_and_need_less_memory(worker: MegatronWorker) -> None:
    rows = Batch({"tokens": BATCH["tokens"], "lengths": BATCH["lengths"]})
    expected = worker.logprobs(rows)
    before = held(worker)
    worker.prepare_for_logprobs(0)
    found = worker.logprobs(rows)
    worker.prepare_for_training(0)
    worker.offloader.require(("optimizer",), "the test")
    assert expected is not None and found is not None
    np.testing.assert_array_equal(found["logprobs"], expected["logprobs"])
    for value, kept in zip(held(worker), before, strict=True):
        assert torch.equal(value, kept)
    del before, value, kept
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    worker.logprobs(rows)
    limit = torch.cuda.max_memory_allocated() - worker.offloader.nbytes("optimizer") // 2
    assert not runs_within(worker, rows, limit), f"within {limit / 2**30:.2f} GiB"
    worker.prepare_for_logprobs(0)
    assert runs_within(worker, rows, limit), f"within {limit / 2**30:.2f} GiB"
    worker.prepare_for_training(0)


def test_copies_for_a_checkpoint_are_in_pinned_memory() -> None:
    staging = StagingBuffers()
    values = [torch.randn(1 << 20, device="cuda"), torch.randn(1001, 3, device="cuda", dtype=torch.bfloat16)[:, 1:]]
    copies = [staging.copy(value) for value in values]
    torch.cuda.synchronize()
    for copy, value in zip(copies, values, strict=True):
        assert copy.is_pinned() and torch.equal(copy, value.cpu())


def test_a_background_checkpoint_has_the_state_at_its_start(
    worker: MegatronWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing starts only after a step has changed weights and optimizer."""
    save, trained = checkpoint.save, threading.Event()
    monkeypatch.setattr(checkpoint, "save", lambda *given: (trained.wait(60), save(*given))[1])
    before = [tensor.cpu() for tensor in held(worker)]
    worker.save_checkpoint(str(tmp_path / "c"), True)
    worker.train_step(BATCH, "likelihood")
    assert not worker.checkpoint_written()
    trained.set()
    worker.finish_checkpoint()
    worker.load_checkpoint(str(tmp_path / "c"))
    for found, value in zip(held(worker), before, strict=True):
        assert torch.equal(found.cpu(), value)
