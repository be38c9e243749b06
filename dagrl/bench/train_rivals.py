"""The two contenders of `bench train`: dagrl's workers under Ray, and a plain Megatron loop in processes of its own."""

from __future__ import annotations

import gc
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dagrl.bench.train_parts import StepParts, step_parts
from dagrl.bench.turns import Side
from dagrl.config import ClusterConfig, Config
from dagrl.errors import RunError
from dagrl.graphs.train import demonstration_step
from dagrl.run.cluster import ray_cluster
from dagrl.runtime.actors import Resources
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.options import SchedulerOptions
from dagrl.runtime.ports import reserve_port
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.runtime.split import split_rows
from dagrl.runtime.worker import WorkerContext
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import merge_step_metrics
from dagrl.workers.megatron import MegatronWorker, cpu

DEADLINE_S = 60.0


class TrainBenchWorker(MegatronWorker):
    """A worker whose process runs one case after another: `become` sets it up in any layout and `leave` releases it."""

    def setup(self, address: str) -> None:
        """Imports what a worker needs."""
        cpu.adapt()
        import dagrl.workers.megatron.trainer

        assert dagrl.workers.megatron.trainer

    def become(self, context: WorkerContext, config: Config, address: str) -> None:
        """Sets up a worker of `context.layout`. Collective over the layout's workers."""
        self.__init__(context, config)  # type: ignore[misc]
        super().setup(address)

    def leave(self) -> None:
        """Drops the model, leaves its process groups and frees the memory."""
        import torch

        self.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def parts(self, batch: Batch) -> StepParts:
        """Runs one step under torch's profiler. Returns where the GPU's time went."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.train_step(batch, "likelihood")
            torch.cuda.synchronize()
        return step_parts(profiler.events())

    def peak_memory(self) -> int:
        """Returns the peak of allocated GPU memory in bytes."""
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


class DagrlSteps:
    """Replays `demonstration_step` on worker groups around actors that are started once.

    `begin` may return before the case is built; `ready` waits for it. `take` returns the seconds of each step.
    """

    name = "dagrl"

    def __init__(self, workers: int) -> None:
        import torch

        self._workers = workers
        self._stack = ExitStack()
        self.losses: list[float] = []
        self.overheads: list[float] = []  # seconds per replay in which no worker ran
        cuda = torch.cuda.is_available()
        self.device = "cuda" if cuda else "cpu"
        self.device_name = torch.cuda.get_device_name() if cuda else ""

    def __enter__(self) -> DagrlSteps:
        gpus = 1.0 if self.device == "cuda" else 0.0
        self._stack.enter_context(ray_cluster(ClusterConfig(num_cpus=max(4, os.cpu_count() or 4))))
        config = Config.model_validate({"name": "train", "algorithm": "sft", "data": {}, "policy": {}})
        layout = ParallelLayout(dp=self._workers)
        group = WorkerGroup.create(
            "train", TrainBenchWorker, layout, config, resources=Resources(num_gpus=gpus), start_timeout_s=DEADLINE_S
        )
        self._stack.callback(group.shutdown, 5.0)
        self._actors = group.actors
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def begin(self, layout: ParallelLayout, config: Config, batch: Batch) -> None:
        self._case, self._batch, self._config = ExitStack(), batch, config
        self.losses, self.overheads = [], []
        self.group = WorkerGroup.from_actors(self._actors[: layout.world_size], layout, call_timeout_s=DEADLINE_S)
        address = f"127.0.0.1:{reserve_port()}"
        contexts = [WorkerContext("train", rank, layout, config.seed, 60.0) for rank in range(layout.world_size)]
        self._building = [
            actor.become.remote(context, config, address) for actor, context in zip(self.group.actors, contexts, strict=True)
        ]

    def ready(self) -> None:
        try:
            self._make_ready()
        except BaseException:
            self.end()  # for the next case
            raise

    def _make_ready(self) -> None:
        self.group.wait(self._building, Deadline(DEADLINE_S, "DEADLINE_S"), "become")
        options = SchedulerOptions(fallback="error", warmup_s=DEADLINE_S)
        self._scheduler = self._case.enter_context(Scheduler([self.group], options))
        bucket = Bucket(self._batch.rows // self.group.layout.dp, self._batch.tokens)
        token_ids = int(self._batch["tokens"].max()) + 1
        scalars = {"global_valid_tokens": 1.0, "global_valid_sequences": 1.0}
        self._scheduler.add(demonstration_step, buckets=[bucket], scalars=scalars, token_ids=token_ids)
        self._scheduler.compile()
        self._scheduler.warmup()

    def take(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            replay = self._scheduler.replay(demonstration_step, self._batch)
            parts = replay.result()
            seconds.append(time.perf_counter() - start)
            assert replay.timing is not None
            self.overheads.append(seconds[-1] - replay.timing.busy_s)
            self.losses.append(merge_step_metrics(parts).flat()["loss"])
        return seconds

    def parts(self) -> StepParts:
        """Returns where the GPU's time of a step goes, for a case of one worker."""
        found: list[StepParts] = self.group.call("parts", self._batch)
        return found[0]

    def peak_bytes(self) -> int:
        return int(max(self.group.call("peak_memory")))

    def end(self) -> None:
        self._case.close()
        self.group.call("leave")


class PlainSteps:
    """Drives the processes of `dagrl.bench.train_plain` in the same way. Their output is below `logs`; `chunked` selects
    their loss."""

    name = "plain"

    def __init__(self, workers: int, logs: Path) -> None:
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
        self._sides = [
            Side(
                "dagrl.bench.train_plain",
                rank,
                logs / f"plain-{rank}.log",
                longest_s=DEADLINE_S,
                variables=variables | {"LOCAL_RANK": str(rank)},
            )
            for rank in range(workers)
        ]
        self._stack = ExitStack()
        self.losses: list[float] = []
        self.overheads: list[float] = []
        self.chunked = True
        self._peak = 0

    def __enter__(self) -> PlainSteps:
        for side in self._sides:
            self._stack.enter_context(side)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def connect(self) -> None:
        """Waits for all processes. Raises RunError if one ends or is late."""
        for side in self._sides:
            side.begin()

    def begin(self, layout: ParallelLayout, config: Config, batch: Batch) -> None:
        self._used = self._sides[: layout.world_size]
        self.losses, self._peak = [], 0
        address = f"127.0.0.1:{reserve_port()}"
        shards = [batch.select(rows) for rows in split_rows(batch["lengths"], layout.dp)]
        for rank, side in enumerate(self._used):
            context = WorkerContext("train", rank, layout, config.seed, 60.0)
            side.tell(("build", context, config, address, shards[context.coordinates.dp], self.chunked))

    def ready(self) -> None:
        self._answers()

    def take(self, steps: int) -> list[float]:
        for side in self._used:
            side.tell(("steps", steps))
        answers = self._answers()
        self.losses += answers[-1]["losses"]
        self._peak = max(answer["peak"] for answer in answers)
        return [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]

    def peak_bytes(self) -> int:
        return self._peak

    def end(self) -> None:
        for side in self._used:
            side.tell(("end",))
        self._answers()

    def _answers(self) -> list[Any]:
        """Returns every process's result. Raises RunError for the first that fails or is late, after all have answered."""
        answers, errors = [], []
        for side in self._used:
            try:
                answers.append(side.answer())
            except RunError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers
