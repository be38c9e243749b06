"""Compares calls and training steps of verl's worker groups: its own, and those of `dagrl.embed.verl.accelerate`.

    dagrl bench embed --json F                                   DataProto and TensorDict, 100 B to 16 MiB, 1 to 8 workers
    dagrl bench embed --workers 64 --bytes 1048576 --rounds 50   on a host with 64 cores or more
    dagrl bench embed --workers --step-workers 2                 training steps alone

Needs verl; `make peers` builds `.venv-peers`, an environment with it. A call returns the data that it was given, whose rows
are shared out over the workers. A step is one of verl's `TrainingWorker` with FSDP2 and a tiny model: a training batch, or
log-probabilities and a training batch. Both groups are on the same actors and take turns, call by call; ratios are
verl's time over dagrl's.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from dagrl.bench import harness, verl_steps
from dagrl.bench.harness import Contest, Take, Turn
from dagrl.cli.numbers import count
from dagrl.config import ClusterConfig
from dagrl.errors import MissingDependencyError
from dagrl.run.cluster import ray_cluster

WARMUP = 3
STEPS = (verl_steps.train, verl_steps.infer_and_train)
MODES = {"DP_COMPUTE_PROTO": "proto", "n-d, TensorDict": "over_mesh"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser, rounds=30)
    parser.add_argument("--workers", type=count, nargs="*", default=[1, 2, 4, 8], help="numbers of workers")
    parser.add_argument("--bytes", type=count, nargs="*", default=[100, 1 << 20, 16 << 20], help="sizes of a whole batch")
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
        names = {
            case_name(mode, workers, size): {"workers": workers, "payload_bytes": size} for mode, size in cases(options)
        }
        contests.append(Contest(f"calls of {workers} workers", names, partial(calls, workers, options), WARMUP))
    for workers in options.step_workers:
        names = {f"step: {step.__name__}, {workers} workers": {"workers": workers} for step in STEPS}
        contests.append(Contest(f"steps of {workers} workers", names, partial(steps, workers), WARMUP))
    harness.run(options, contests)


def cases(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Returns each kind of data in every size."""
    return [(mode, size) for mode in MODES for size in options.bytes]


def case_name(mode: str, workers: int, size: int) -> str:
    """Returns the name of a case of calls."""
    return f"{mode}, {workers} workers, {size} bytes"


@contextmanager
def cluster(workers: int) -> Iterator[None]:
    """Starts Ray; verl's pools ask for ten CPUs per worker."""
    with ray_cluster(ClusterConfig(num_cpus=10 * workers), verl_steps.ON_CPU | {"OMP_NUM_THREADS": "1"}):
        yield


@contextmanager
def calls(workers: int, options: argparse.Namespace) -> Iterator[dict[str, Take]]:
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
        rows, data = max(workers, 8), {}
        for mode, size in cases(options):
            values = torch.arange(max(1, size // 8 // rows) * rows).view(rows, -1)
            proto = mode == "DP_COMPUTE_PROTO"
            made = DataProto.from_single_dict({"x": values}) if proto else TensorDict({"x": values}, batch_size=[rows])
            data[case_name(mode, workers, size)] = MODES[mode], made
        yield {
            side: partial(timed, {name: partial(getattr(one, method), made) for name, (method, made) in data.items()})
            for side, one in (("dagrl", fast), ("verl", group))
        }
        fast.close()


@contextmanager
def steps(workers: int) -> Iterator[dict[str, Take]]:
    """Yields verl's training steps."""
    from dagrl.embed.verl import accelerate

    with cluster(workers), tempfile.TemporaryDirectory() as directory:
        group = verl_steps.training_group(verl_steps.write_model(Path(directory)), workers)
        fast = accelerate(group)
        batch = verl_steps.training_batch(0, rows=4 * workers)
        yield {
            side: partial(timed, {f"step: {step.__name__}, {workers} workers": partial(step, one, batch) for step in STEPS})
            for side, one in (("dagrl", fast), ("verl", group))
        }
        fast.close()


def timed(acts: Mapping[str, Callable[[], object]]) -> dict[str, Turn]:
    """Takes a turn: one call of each case."""
    found = {}
    for name, act in acts.items():
        started = time.perf_counter()
        act()
        found[name] = Turn([time.perf_counter() - started])
    return found


def echo_class() -> type:
    """Returns the class of a verl worker whose methods return what they are given."""
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register

    class Echo(Worker):  # type: ignore[misc]
        """Every rank is a data-parallel rank of the mesh `train`."""

        def __init__(self) -> None:
            super().__init__()
            self._register_dispatch_collect_info("train", self.rank, True)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)  # type: ignore[untyped-decorator]
        def proto(self, data: Any) -> Any:
            return data

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))  # type: ignore[untyped-decorator]
        def over_mesh(self, data: Any) -> Any:
            return data

    return Echo
