"""What train benchmarks share: how they run, batches of full rows, and a worker in this process without Ray."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bench.report import Report, command_line, hardware
from dagrl.errors import ConfigError
from dagrl.layout import ParallelLayout
from dagrl.ports import reserve_port
from dagrl.shapes import Array, Batch
from dagrl.worker import WorkerContext
from workers.megatron import MegatronWorker

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dagrl.config import Config

Worker = TypeVar("Worker", bound=MegatronWorker)
Row = TypeVar("Row", bound="DataclassInstance")


def measure_and_report(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path], list[Row]],
    print_table: Callable[[list[Row]], None],
    *,
    without_gpu: str | None = None,
) -> None:
    """Measure, with a directory for checkpoints; print the table; write what `--json` asks for.

    `without_gpu` says why a measurement is of no use without one: ConfigError then.
    """
    import torch

    gpu = torch.cuda.is_available()
    if without_gpu is not None and not gpu:
        raise ConfigError(f"found no GPU; {without_gpu}")
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(options, Path(directory))
    print_table(rows)
    if options.json:
        where = torch.cuda.get_device_name() if gpu else hardware()
        Report([asdict(row) for row in rows], command_line(), hardware=where).write(options.json)


def train_batch(rows: int, length: int, vocabulary: int, seed: int = 0) -> Batch:
    """Random tokens; every row is full, and every token but the first counts."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (rows, length))
    mask = np.ones((rows, length), np.float32)
    mask[:, 0] = 0
    fields: dict[str, Array] = {"tokens": tokens, "lengths": np.full(rows, length, np.int64), "loss_mask": mask}
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(rows)}
    return Batch(fields, scalars)


@contextmanager
def single_worker(config: Config, kind: type[Worker]) -> Iterator[Worker]:
    """A worker of a group of one, in this process."""
    for name, value in kind.environment(config).items():
        os.environ.setdefault(name, value)
    worker = kind(WorkerContext("train", 0, ParallelLayout(), config.seed, 120.0), config)
    worker.setup(f"127.0.0.1:{reserve_port()}")
    try:
        yield worker
    finally:
        worker.shutdown()
