"""Measures what a GRPO step costs on top of its workers' own time: the step's time minus that of the slowest worker.

    dagrl bench step_overhead --workers 8,64,128 --json F --plot F [--steps N]
    dagrl bench step_overhead --kind sft                an SFT step in which workers compute for a second

Phases, scheduler, both executors and batches are those of a run. `grpo` runs quanta of generation, log-probabilities of the
policy and the reference, an optimizer step and a refit, one after another; half of the workers train, half generate. `sft`
runs one optimizer step on all workers. Workers are processes in shards of up to eight. A phase sleeps for as long as a GPU
might compute and returns what a rank would return, so any number of workers fits one host. `busy` is the wall time that the
slowest worker spent inside its methods, by its own clock. With real workers this is not GPU time: work on the CPU, such as
reading the batch and launching kernels, counts as the worker's own, and the rest is what dagrl adds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from operator import add
from pathlib import Path

import numpy as np

from dagrl.bench.deadline import BenchDeadline, add_deadline
from dagrl.bench.report import Row, add_outputs, count, drawing, print_rows, report_rows, whole_numbers
from dagrl.config import ClusterConfig
from dagrl.errors import LayoutError
from dagrl.graphs.generate import generate
from dagrl.graphs.logprobs import logprobs, reference_logprobs
from dagrl.graphs.refit import refit
from dagrl.graphs.train import demonstration_step, train_step
from dagrl.refit import RefitReport, merge_reports
from dagrl.rl.generation import FinishedRequest, Generated, merge_generated, pack_generated
from dagrl.run.cluster import ray_cluster
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.options import SchedulerOptions
from dagrl.runtime.phase import Phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.runtime.worker import WorkerContext, in_warmup
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics

EXECUTORS = ("compiled", "eager")
ROLES = {"grpo": ("train", "generation"), "sft": ("train",)}
SHARD = 8
"""Workers per shard: the most that tensor and pipeline parallelism use within one host."""

ROWS, TOKENS, NEW_TOKENS, QUANTA = 32, 1024, 512, 8
"""Per shard: sequences per step, tokens per sequence, generated tokens per sequence; quanta per step."""

SECONDS = {
    "generate": 0.05,
    "logprobs": 0.04,
    "reference_logprobs": 0.04,
    "train_step": 0.12,
    "refit": 0.01,
    "demonstration_step": 1.0,
}
DEADLINE_S = 240.0


class SleepingWorker:
    """A train or generation rank that sleeps where a GPU would compute."""

    def __init__(self, context: WorkerContext, config: object) -> None:
        self.context = context
        where = context.coordinates
        self._reports = where.tp == 0 and where.pp == context.layout.pp - 1

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        """Returns as many metrics as a GRPO step reports."""
        self.compute("demonstration_step" if loss == "likelihood" else "train_step")
        names = [f"metric {number}" for number in range(12)]
        return StepMetrics(dict.fromkeys(names, 1.0), {"largest": 1.0}, {"lr": 1.0}) if self._reports else StepMetrics()

    def keep_logprobs(self, batch: Batch, model: str) -> None:
        """Computes the log-probabilities of the shard's rows, which stay with the workers."""
        self.compute("logprobs" if model == "policy" else "reference_logprobs")

    def generate(self, batch: Batch) -> Generated:
        """Returns every request of the batch, finished."""
        self.compute("generate")
        rows = [row for row, length in enumerate(batch["lengths"].tolist()) if length]
        made = [
            FinishedRequest(int(batch["request_ids"][row]), [7] * NEW_TOKENS, [-1.0] * NEW_TOKENS, [0] * NEW_TOKENS, "stop")
            for row in rows
        ]
        return pack_generated(made, [], 16)

    def send_weights(self, version: int) -> RefitReport:
        """Stands in for either side of a refit."""
        self.compute("refit")
        return RefitReport(version, 1, 0, SECONDS["refit"], SECONDS["refit"])

    receive_weights = send_weights

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        """Merges like the Megatron worker."""
        return merge_step_metrics(parts)

    def merge_generated(self, parts: list[Generated]) -> Generated:
        """Merges like the vLLM worker."""
        return merge_generated(parts)

    def merge_reports(self, parts: list[RefitReport]) -> RefitReport:
        """Merges like both workers."""
        return merge_reports(parts)

    def compute(self, phase: str) -> None:
        """Takes as long as a GPU might."""
        if not in_warmup():
            time.sleep(SECONDS[phase])


class IdleWorker(SleepingWorker):
    """A worker that computes nothing, so that a step is all overhead."""

    def compute(self, phase: str) -> None:
        """Takes no time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=ROLES, default="grpo", help="the kind of step")
    parser.add_argument(
        "--workers", type=whole_numbers, default=(8,), help="numbers of workers over all roles, e.g. 8,64,128"
    )
    parser.add_argument("--steps", type=count, default=20, help="counted steps per executor")
    add_outputs(parser)
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    layouts = {workers: layout_of(options.kind, workers) for workers in options.workers}
    deadline = BenchDeadline(options.deadline)
    turns = deadline.each(layouts, "{} workers".format)
    measured = accumulate((measure(options.kind, layouts[workers], options.steps) for workers in turns), add)
    report_rows(options, measured, print_table, plot, deadline=deadline)


def layout_of(kind: str, workers: int) -> ParallelLayout:
    """Returns the layout of each role. Raises LayoutError if the roles' shards cannot add up to `workers`."""
    roles = len(ROLES[kind])
    each = workers // roles
    width = max(1, min(SHARD, each))
    if workers < roles or each * roles != workers or each % width:
        raise LayoutError(
            f"--workers {workers}: {' and '.join(ROLES[kind])} get up to {SHARD} workers each, or a multiple of {SHARD}; "
            f"choose {roles} to {roles * SHARD} in steps of {roles}, or a multiple of {roles * SHARD}"
        )
    return ParallelLayout(dp=each // width, tp=width)


def measure(kind: str, layout: ParallelLayout, steps: int) -> list[Row]:
    """Measures both executors in turn, on the same workers."""
    samples: dict[str, list[tuple[float, float]]] = {executor: [] for executor in EXECUTORS}
    with groups(kind, layout) as made:
        for executor in EXECUTORS:
            with scheduler_of(kind, made, executor) as scheduler:
                one_step(kind, scheduler, 0, layout.dp)  # the first step of a new graph does not count
                for step in range(steps):
                    samples[executor].append(one_step(kind, scheduler, step, layout.dp))
        workers = sum(len(group.actors) for group in made)
    return [_row(kind, executor, workers, taken) for executor, taken in samples.items()]


@contextmanager
def groups(kind: str, layout: ParallelLayout, *, idle: bool = False) -> Iterator[list[WorkerGroup]]:
    """Yields the workers of each role, on a Ray cluster of their own."""
    worker = IdleWorker if idle else SleepingWorker
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(ClusterConfig(num_cpus=os.cpu_count(), num_gpus=0), {"OMP_NUM_THREADS": "1"}))
        made = []
        for role in ROLES[kind]:
            made.append(WorkerGroup.create(role, worker, layout, None, start_timeout_s=DEADLINE_S))
            stack.callback(made[-1].shutdown, 2.0)
        yield made


@contextmanager
def scheduler_of(kind: str, made: Sequence[WorkerGroup], executor: str) -> Iterator[Scheduler]:
    """Yields a scheduler with the phases of a step, compiled and warmed up."""
    bucket, rows_bytes = Bucket(ROWS, TOKENS), ROWS * (TOKENS + NEW_TOKENS) * 24 + (1 << 16)
    options = SchedulerOptions(executor=executor, fallback="error", compile_s=DEADLINE_S, warmup_s=DEADLINE_S)  # type: ignore[arg-type]
    with Scheduler(made, options) as scheduler:
        scalars = {"global_valid_tokens": 1.0, "global_valid_sequences": 1.0}
        for phase in (train_step, logprobs, reference_logprobs, generate) if kind == "grpo" else (demonstration_step,):
            scheduler.add(phase, buckets=[bucket], scalars=scalars, result_bytes=rows_bytes)
        if kind == "grpo":
            scheduler.add(refit, warmup_value=0)
        scheduler.compile()
        scheduler.warmup()
        yield scheduler


def one_step(kind: str, scheduler: Scheduler, step: int, shards: int) -> tuple[float, float]:
    """Returns the seconds of a step and of its slowest workers' own time."""
    inputs = (
        grpo_inputs(step, ROWS * shards) if kind == "grpo" else [(demonstration_step, _batch(ROWS * shards, ("loss_mask",)))]
    )
    started, replays = time.perf_counter(), []
    for phase, value in inputs:
        replays.append(scheduler.replay(phase, value))
        replays[-1].result()
    busy = sum(replay.timing.busy_s for replay in replays if replay.timing is not None)
    return time.perf_counter() - started, busy


def grpo_inputs(step: int, rows: int) -> list[tuple[Phase, Batch | int]]:
    """Returns the phases of a step in order, each with its input."""
    sequences = _batch(rows, ())
    names, row_ids = ("loss_mask", "advantages", "generation_logprobs"), np.arange(rows)
    quanta = [(generate, _requests(sequences, part)) for part in np.array_split(np.arange(rows), QUANTA)]
    return [
        *quanta,
        (logprobs, sequences.with_fields(row_ids=row_ids)),
        (reference_logprobs, sequences.with_fields(row_ids=row_ids)),
        (train_step, _batch(rows, names).with_fields(row_ids=row_ids)),
        (refit, step),
    ]


def _batch(rows: int, fields: Sequence[str]) -> Batch:
    """Returns full rows of tokens, with the training fields named by `fields`."""
    lengths = np.full(rows, TOKENS)
    tokens, floats = np.ones((rows, TOKENS), np.int64), np.ones((rows, TOKENS), np.float32)
    sequences = Batch({"tokens": tokens, "lengths": lengths})
    learned = sequences.with_fields(**dict.fromkeys(fields, floats))
    return learned.with_scalars(global_valid_tokens=1.0, global_valid_sequences=1.0) if fields else sequences


def _requests(sequences: Batch, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Batch:
    count = len(rows)
    return sequences.select(rows).with_fields(
        request_ids=rows.astype(np.int64),
        seeds=np.zeros(count, np.int64),
        max_new_tokens=np.full(count, NEW_TOKENS),
        greedy=np.zeros(count, np.int64),
    )


def _row(kind: str, executor: str, workers: int, samples: Sequence[tuple[float, float]]) -> Row:
    """Returns medians over steps in seconds: the step, its slowest workers' own time, the difference with its quartiles."""
    table = np.asarray(samples)
    step, busy = np.median(table, axis=0).tolist()
    low, middle, high = np.percentile(table[:, 0] - table[:, 1], [25, 50, 75]).tolist()
    return {
        "kind": kind,
        "executor": executor,
        "workers": workers,
        "steps": len(samples),
        "step_s": step,
        "busy_s": busy,
        "overhead_s": middle,
        "overhead_low_s": low,
        "overhead_high_s": high,
        "share": middle / step,
    }


def print_table(rows: Sequence[Row]) -> None:
    names = ("step_s", "busy_s", "overhead_s", "overhead_low_s", "overhead_high_s")
    lines = (
        (row["kind"], row["workers"], row["executor"], *(f"{1e3 * row[name]:.1f}" for name in names), f"{row['share']:.1%}")
        for row in rows
    )
    title = f"grpo: a step of {QUANTA} quanta, 2 log-probabilities, 1 optimizer step, 1 refit; sft: 1 optimizer step"
    columns = "kind, workers, executor, step ms, busy ms, overhead ms, quartiles: low, high, share"
    print_rows(columns.split(", "), lines, title)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots the overhead over the number of workers."""
    with drawing(path, figsize=(6, 4)) as (_, ((axes,),)):
        for executor in EXECUTORS:
            mine = [row for row in rows if row["executor"] == executor]
            low, middle, high = (
                np.array([1e3 * row[name] for row in mine]) for name in ("overhead_low_s", "overhead_s", "overhead_high_s")
            )
            spread = [middle - low, high - middle]
            axes.errorbar([row["workers"] for row in mine], middle, yerr=spread, marker="o", capsize=3, label=executor)
        axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms per step", title="step minus slowest workers")
        counts = sorted({row["workers"] for row in rows})
        axes.set_xticks(counts, map(str, counts))
        axes.grid(alpha=0.3)
        axes.legend()
