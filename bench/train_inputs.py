"""What train benchmarks share: batches of full rows, and a worker in this process without Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from dagrl.layout import ParallelLayout
from dagrl.shapes import Batch
from dagrl.worker import WorkerContext

if TYPE_CHECKING:
    from dagrl.config import Config
    from workers.megatron import MegatronWorker


def train_batch(rows: int, length: int, vocabulary: int, seed: int = 0) -> Batch:
    """Random tokens; every row is full, and every token but the first counts."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (rows, length))
    mask = np.ones((rows, length), np.float32)
    mask[:, 0] = 0
    fields = {"tokens": tokens, "lengths": np.full(rows, length, np.int64), "loss_mask": mask}
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(rows)}
    return Batch(fields, scalars)


@contextmanager
def single_worker(config: Config) -> Iterator[MegatronWorker]:
    """A worker of a group of one, in this process."""
    from workers.megatron import MegatronWorker

    for name, value in MegatronWorker.environment(config).items():
        os.environ.setdefault(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = MegatronWorker(WorkerContext("train", 0, ParallelLayout(), config.seed, 120.0), config)
    worker.setup(f"127.0.0.1:{port}")
    try:
        yield worker
    finally:
        worker.shutdown()
