"""Measures calls and training steps of verl's worker groups: its own, and those of `dagrl.embed.verl.accelerate`.

    dagrl bench embed --json F                                   DataProto and TensorDict, 100 B to 16 MiB, 1 to 8 workers
    dagrl bench embed --workers 64 --bytes 1048576 --rounds 50   on a host with 64 cores or more
    dagrl bench embed --workers --step-workers 2                 training steps alone

Needs verl; `make peers` builds `.venv-peers`, an environment with it. A call returns the data that it was given, whose rows
are shared out over the workers. A step is one of verl's `TrainingWorker` with FSDP2 and a tiny model: a training batch, or
log-probabilities and a training batch. Both groups are on the same actors and take turns, call by call. The report has the
median of each and, as `ratio`, the median of the quotients of neighbouring calls, with their quartiles.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from dagrl.bench import verl_steps
from dagrl.bench.embed_worker import echo_class
from dagrl.bench.report import Row, add_outputs, count, print_rows, report_rows
from dagrl.config import ClusterConfig
from dagrl.errors import MissingDependencyError
from dagrl.run.cluster import ray_cluster

WARMUP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_outputs(parser, plot=False)
    parser.add_argument("--workers", type=count, nargs="*", default=[1, 2, 4, 8], help="numbers of workers")
    parser.add_argument("--bytes", type=int, nargs="*", default=[100, 1 << 20, 16 << 20], help="sizes of a whole batch")
    parser.add_argument("--rounds", type=count, default=30, help="calls of each group per case")
    parser.add_argument("--step-workers", type=count, nargs="*", default=[2], help="numbers of workers of training steps")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested file after each number of workers."""
    os.environ.update(verl_steps.ON_CPU)
    report_rows(options, _measure(options), _print)


def _measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yields all rows so far after each number of workers."""
    rows: list[Row] = []
    parts = [(_calls, workers) for workers in options.workers] + [(_steps, workers) for workers in options.step_workers]
    for measure, workers in parts:
        # verl's pools ask for ten CPUs per worker
        with ray_cluster(ClusterConfig(num_cpus=10 * workers), verl_steps.ON_CPU | {"OMP_NUM_THREADS": "1"}):
            rows += measure(workers, options)
        yield rows


def _calls(workers: int, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of the calls of verl workers that return what they are given."""
    try:
        from verl import DataProto
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    except ImportError as missing:
        raise MissingDependencyError(f"dagrl bench embed needs verl ({missing}); pip install verl") from missing
    import torch
    from tensordict import TensorDict

    from dagrl.embed.verl import accelerate

    pool = RayResourcePool([workers], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(echo_class())), device_name="cpu")
    fast = accelerate(group)
    for size in options.bytes:
        rows = max(workers, 8)
        values = torch.arange(max(1, size // 8 // rows) * rows).view(rows, -1)
        proto, table = DataProto.from_single_dict({"x": values}), TensorDict({"x": values}, batch_size=[rows])
        cases = {"DP_COMPUTE_PROTO": ("proto", proto), "n-d, TensorDict": ("over_mesh", table)}
        for mode, (method, data) in cases.items():
            taken = _in_turns([partial(getattr(one, method), data) for one in (group, fast)], options.rounds)
            yield _row(mode, workers, values.nbytes, taken)
    fast.close()


def _steps(workers: int, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of verl's training steps."""
    from dagrl.embed.verl import accelerate

    with tempfile.TemporaryDirectory() as directory:
        group = verl_steps.training_group(verl_steps.write_model(Path(directory)), workers)
        fast = accelerate(group)
        batch = verl_steps.training_batch(0, rows=4 * workers)
        size = sum(value.values().nbytes for value in batch.values() if getattr(value, "is_nested", False))
        for step in (verl_steps.train, verl_steps.infer_and_train):
            taken = _in_turns([partial(step, one, batch) for one in (group, fast)], options.rounds)
            yield _row(f"step: {step.__name__}", workers, size, taken)
        fast.close()


def _in_turns(calls: Sequence[Callable[[], object]], rounds: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns seconds, `[rounds, calls]`. Every other round goes through the calls in reverse."""
    taken = np.zeros((rounds, len(calls)))
    for number in range(-WARMUP, rounds):
        order = range(len(calls)) if number % 2 == 0 else reversed(range(len(calls)))
        for which in order:
            started = time.perf_counter()
            calls[which]()
            if number >= 0:
                taken[number, which] = time.perf_counter() - started
    return taken


def _row(mode: str, workers: int, size: int, taken: np.ndarray[Any, np.dtype[np.float64]]) -> Row:
    low, ratio, high = np.percentile(taken[:, 0] / taken[:, 1], [25, 50, 75])
    verl_us, dagrl_us = np.median(taken, axis=0) * 1e6
    return {
        "mode": mode,
        "workers": workers,
        "payload_bytes": size,
        "verl_us": round(float(verl_us), 1),
        "dagrl_us": round(float(dagrl_us), 1),
        "ratio": round(float(ratio), 2),
        "ratio_low": round(float(low), 2),
        "ratio_high": round(float(high), 2),
        "n": len(taken),
    }


def _print(rows: Sequence[Row]) -> None:
    columns = "mode, workers, bytes, verl us, dagrl us, ratio, quartiles: low, high, n"
    print_rows(columns.split(", "), (row.values() for row in rows))
