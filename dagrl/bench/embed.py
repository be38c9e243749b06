"""Compares calls and training steps of verl's worker groups: its own, and those of `dagrl.embed.verl.accelerate`.

    dagrl bench embed --json F                                   DataProto and TensorDict, 100 B to 16 MiB, 1 to 8 workers
    dagrl bench embed --workers 64 --bytes 1048576 --rounds 50   on a host with 64 cores or more
    dagrl bench embed --workers --step-workers 2                 training steps alone

Needs verl; `make peers` builds `.venv-peers`, an environment with it. A call returns the data that it was given, whose rows
are shared out over the workers. A step is one of verl's `TrainingWorker` with FSDP2 and a tiny model: a training batch, or
log-probabilities and a training batch. Both groups are on the same actors and take turns, call by call; ratios are
verl's time over dagrl's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from dagrl.bench import harness, verl_steps
from dagrl.bench.embed_worker import echo_class
from dagrl.bench.harness import Contest, Take, Turn
from dagrl.bench.report import count
from dagrl.config import ClusterConfig
from dagrl.errors import MissingDependencyError
from dagrl.run.cluster import ray_cluster

WARMUP = 3
MODES = {"DP_COMPUTE_PROTO": "proto", "n-d, TensorDict": "over_mesh"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser, rounds=30)
    parser.add_argument("--workers", type=count, nargs="*", default=[1, 2, 4, 8], help="numbers of workers")
    parser.add_argument("--bytes", type=int, nargs="*", default=[100, 1 << 20, 16 << 20], help="sizes of a whole batch")
    parser.add_argument("--step-workers", type=count, nargs="*", default=[2], help="numbers of workers of training steps")


def run(options: argparse.Namespace) -> None:
    os.environ.update(verl_steps.ON_CPU)
    try:
        import verl
    except ImportError as missing:
        raise MissingDependencyError(f"dagrl bench embed needs verl ({missing}); pip install verl") from missing
    assert verl
    contests = []
    for workers in options.workers:
        for mode in MODES:
            for size in options.bytes:
                name = f"{mode}, {workers} workers, {size} bytes"
                sizes = {name: {"workers": workers, "payload_bytes": size}}
                contests.append(Contest(name, sizes, partial(calls, name, mode, workers, size), WARMUP))
    for workers in options.step_workers:
        for step in (verl_steps.train, verl_steps.infer_and_train):
            name = f"step: {step.__name__}, {workers} workers"
            contests.append(Contest(name, {name: {"workers": workers}}, partial(steps, name, step, workers), WARMUP))
    harness.run(options, contests)


@contextmanager
def cluster(workers: int) -> Iterator[None]:
    """Starts Ray; verl's pools ask for ten CPUs per worker."""
    with ray_cluster(ClusterConfig(num_cpus=10 * workers), verl_steps.ON_CPU | {"OMP_NUM_THREADS": "1"}):
        yield


@contextmanager
def calls(name: str, mode: str, workers: int, size: int) -> Iterator[dict[str, Take]]:
    """Yields calls of verl workers that return what they are given."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from dagrl.embed.verl import accelerate

    with cluster(workers):
        pool = RayResourcePool([workers], use_gpu=False)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(echo_class())), device_name="cpu")
        fast = accelerate(group)
        rows = max(workers, 8)
        values = torch.arange(max(1, size // 8 // rows) * rows).view(rows, -1)
        proto = mode == "DP_COMPUTE_PROTO"
        data = DataProto.from_single_dict({"x": values}) if proto else TensorDict({"x": values}, batch_size=[rows])
        yield {side: partial(timed, name, partial(getattr(one, MODES[mode]), data)) for side, one in sides(group, fast)}
        fast.close()


@contextmanager
def steps(name: str, step: Callable[[Any, Any], object], workers: int) -> Iterator[dict[str, Take]]:
    """Yields verl's training steps."""
    from dagrl.embed.verl import accelerate

    with cluster(workers), tempfile.TemporaryDirectory() as directory:
        group = verl_steps.training_group(verl_steps.write_model(Path(directory)), workers)
        fast = accelerate(group)
        batch = verl_steps.training_batch(0, rows=4 * workers)
        yield {side: partial(timed, name, partial(step, one, batch)) for side, one in sides(group, fast)}
        fast.close()


def sides(group: Any, fast: Any) -> list[tuple[str, Any]]:
    """Returns both groups by the name of their side."""
    return [("dagrl", fast), ("verl", group)]


def timed(name: str, call: Callable[[], object]) -> dict[str, Turn]:
    """Takes a turn of one call."""
    started = time.perf_counter()
    call()
    return {name: Turn([time.perf_counter() - started])}
