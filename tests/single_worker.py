"""A train worker in this process without Ray, and full batches for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from dagrl.config import Config
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Array, Batch
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.train.worker import TrainWorker

Worker = TypeVar("Worker", bound=TrainWorker)


def train_batch(rows: int, length: int, vocabulary: int) -> Batch:
    """Returns random tokens in full rows; every token but the first counts in the loss."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (rows, length))
    mask = np.ones((rows, length), np.float32)
    mask[:, 0] = 0
    fields: dict[str, Array] = {"tokens": tokens, "lengths": np.full(rows, length, np.int64), "loss_mask": mask}
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(rows)}
    return Batch(fields, scalars)


@contextmanager
def single_worker(config: Config, kind: type[Worker]) -> Iterator[Worker]:
    """Yields a worker of a one-worker group in this process."""
    for name, value in kind.environment(config).items():
        os.environ.setdefault(name, value)
    worker = kind(WorkerContext("train", 0, ParallelLayout(), config.seed, 120.0), config)
    worker.setup(f"127.0.0.1:{reserve_port()}")
    try:
        yield worker
    finally:
        worker.shutdown()
