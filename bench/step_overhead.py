"""What a GRPO step costs beyond its workers' own time: the step's time less that of the slowest worker, phase by phase.

    dagrl bench step_overhead --workers 8,64,128 --json F --plot F [--steps N]
    dagrl bench step_overhead --kind sft                a step of SFT in which workers compute for a second

The phases, the scheduler, both executors and the batches are those of a run. `grpo`: quanta of generation, log-probabilities
of the policy and the reference, an optimizer step, a refit, one after the other; half of the workers train, half generate.
`sft`: an optimizer step of all. The workers are processes that stand in for ranks, in shards of up to eight: a phase sleeps
for as long as a GPU might compute, and returns what a rank would, so that any number fits one host. `busy` is wall time that
the slowest worker spent inside its methods, read from its clock. With real workers that is not a GPU's time: what a method
does on the CPU, reading its batch and launching kernels, counts as the worker's own, and the rest is what dagrl adds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.deadline import Deadline, add_deadline
from bench.report import write_rows
from dagrl.errors import LayoutError
from dagrl.generation import FinishedRequest, Generated, merge_generated, pack_generated
from dagrl.layout import ParallelLayout
from dagrl.phase import Phase
from dagrl.refit.run import RefitReport, merge_reports
from dagrl.scheduler import Scheduler, SchedulerOptions
from dagrl.shapes import Batch, Bucket
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics
from dagrl.worker import WorkerContext, in_warmup
from dagrl.worker_group import WorkerGroup
from graphs.generate import generate
from graphs.logprobs import logprobs, reference_logprobs
from graphs.refit import refit
from graphs.train import sft_step, train_step

EXECUTORS = ("compiled", "eager")
ROLES = {"grpo": ("train", "generation"), "sft": ("train",)}
SHARD = 8
"""Workers of a shard, as many as tensor and pipeline parallelism may have of one host."""

ROWS, TOKENS, NEW_TOKENS, QUANTA = 32, 1024, 512, 8
"""Of one shard: sequences of a step, their width, and generated tokens each; quanta of a step."""

SECONDS = {
    "generate": 0.05,
    "logprobs": 0.04,
    "reference_logprobs": 0.04,
    "train_step": 0.12,
    "refit": 0.01,
    "sft_step": 1.0,
}
DEADLINE_S = 240.0


class StandIn:
    """A rank of a train or a generation worker that waits where a GPU would compute."""

    def __init__(self, context: WorkerContext, config: object) -> None:
        self.context = context
        where = context.coordinates
        self._reports = where.tp == 0 and where.pp == context.layout.pp - 1

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        """As many numbers as a GRPO step reports."""
        _compute("sft_step" if loss == "sft" else "train_step")
        names = [f"metric {number}" for number in range(12)]
        return StepMetrics(dict.fromkeys(names, 1.0), {"largest": 1.0}, {"lr": 1.0}) if self._reports else StepMetrics()

    def logprobs(self, batch: Batch, model: str) -> Batch | None:
        """Log-probabilities and entropies of the shard's rows, from one worker."""
        _compute("logprobs" if model == "policy" else "reference_logprobs")
        if not self._reports:
            return None
        values = np.zeros(batch["tokens"].shape, np.float32)
        return Batch({"lengths": batch["lengths"], "logprobs": values, "entropy": values}, batch.scalars)

    def generate(self, batch: Batch) -> Generated:
        """Every request of the batch, finished."""
        _compute("generate")
        rows = [row for row, length in enumerate(batch["lengths"].tolist()) if length]
        made = [
            FinishedRequest(int(batch["request_ids"][row]), [7] * NEW_TOKENS, [-1.0] * NEW_TOKENS, [0] * NEW_TOKENS, "stop")
            for row in rows
        ]
        return pack_generated(made, [], 16)

    def send_weights(self, version: int) -> RefitReport:
        """A part of a refit."""
        _compute("refit")
        return RefitReport(version, 1, 0, SECONDS["refit"], SECONDS["refit"])

    def receive_weights(self, version: int) -> RefitReport:
        """The other part."""
        return self.send_weights(version)

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        """As the Megatron worker does it."""
        return merge_step_metrics(parts)

    def merge_rows(self, parts: list[Batch | None]) -> Batch | None:
        """As the Megatron worker does it."""
        return next((part for part in parts if part is not None), None)

    def merge_generated(self, parts: list[Generated]) -> Generated:
        """As the vLLM worker does it."""
        return merge_generated(parts)

    def merge_reports(self, parts: list[RefitReport]) -> RefitReport:
        """As both workers do it."""
        return merge_reports(parts)


def _compute(phase: str) -> None:
    if not in_warmup():
        time.sleep(SECONDS[phase])


@dataclass(frozen=True)
class Result:
    """Medians over steps, in seconds: a step, its slowest workers' own time, the rest; and the quartiles of the rest."""

    kind: str
    executor: str
    workers: int
    steps: int
    step_s: float
    busy_s: float
    overhead_s: float
    overhead_low_s: float
    overhead_high_s: float
    share: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench step_overhead`."""
    parser.add_argument("--kind", choices=ROLES, default="grpo", help="the step that is measured")
    parser.add_argument("--workers", type=_numbers, default=[8], help="numbers of workers over all roles, e.g. 8,64,128")
    parser.add_argument("--steps", type=int, default=20, help="steps that count, of each executor")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the rows to this file (png, svg)")
    add_deadline(parser)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers separated by commas, as 8,64,128") from error


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    layouts = {workers: layout_of(options.kind, workers) for workers in options.workers}
    deadline, results = Deadline(options.deadline), []
    for workers in deadline.each(layouts, "{} workers".format):
        results += measure(options.kind, layouts[workers], options.steps)
        write_rows(options.json, results, deadline.left_out)
    write_rows(options.json, results, deadline.left_out)
    print_table(results)
    deadline.tell()
    if options.plot and results:
        plot(results, options.plot)


def layout_of(kind: str, workers: int) -> ParallelLayout:
    """Of each role. Raises LayoutError for a number of workers that the shards of all roles do not add up to."""
    roles = len(ROLES[kind])
    each = workers // roles
    width = max(1, min(SHARD, each))
    if workers < roles or each * roles != workers or each % width:
        raise LayoutError(
            f"--workers {workers}: {' and '.join(ROLES[kind])} get up to {SHARD} workers each, or a multiple of {SHARD}; "
            f"choose {roles} to {roles * SHARD} in steps of {roles}, or a multiple of {roles * SHARD}"
        )
    return ParallelLayout(dp=each // width, tp=width)


def measure(kind: str, layout: ParallelLayout, steps: int) -> list[Result]:
    """Both executors in turn, on the same workers."""
    samples: dict[str, list[tuple[float, float]]] = {executor: [] for executor in EXECUTORS}
    with groups(kind, layout) as made:
        for executor in EXECUTORS:
            with scheduler_of(kind, made, executor) as scheduler:
                one_step(kind, scheduler, 0, layout.dp)  # the first of a new graph
                for step in range(steps):
                    samples[executor].append(one_step(kind, scheduler, step, layout.dp))
        workers = sum(len(group.actors) for group in made)
    return [_result(kind, executor, workers, taken) for executor, taken in samples.items()]


@contextmanager
def groups(kind: str, layout: ParallelLayout) -> Iterator[list[WorkerGroup]]:
    """A cluster of its own with the workers of each role."""
    from dagrl.cluster import ray_cluster
    from dagrl.config import ClusterConfig

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(ClusterConfig(num_cpus=os.cpu_count(), num_gpus=0), {"OMP_NUM_THREADS": "1"}))
        made = []
        for role in ROLES[kind]:
            made.append(WorkerGroup.create(role, StandIn, layout, None, start_timeout_s=DEADLINE_S))
            stack.callback(made[-1].shutdown, 2.0)
        yield made


@contextmanager
def scheduler_of(kind: str, made: Sequence[WorkerGroup], executor: str) -> Iterator[Scheduler]:
    """The phases of a step, compiled and warm."""
    bucket, rows_bytes = Bucket(ROWS, TOKENS), ROWS * (TOKENS + NEW_TOKENS) * 24 + (1 << 16)
    options = SchedulerOptions(executor=executor, fallback="error", compile_s=DEADLINE_S, warmup_s=DEADLINE_S)  # type: ignore[arg-type]
    with Scheduler(made, options) as scheduler:
        scalars = {"global_valid_tokens": 1.0, "global_valid_sequences": 1.0}
        for phase in (train_step, logprobs, reference_logprobs, generate) if kind == "grpo" else (sft_step,):
            scheduler.add(phase, buckets=[bucket], scalars=scalars, result_bytes=rows_bytes)
        if kind == "grpo":
            scheduler.add(refit, warmup_value=0)
        scheduler.compile()
        scheduler.warmup()
        yield scheduler


def one_step(kind: str, scheduler: Scheduler, step: int, shards: int) -> tuple[float, float]:
    """Seconds of a step, and of its slowest workers' own time."""
    inputs = grpo_inputs(step, ROWS * shards) if kind == "grpo" else [(sft_step, _batch(ROWS * shards, ("loss_mask",)))]
    started, replays = time.perf_counter(), []
    for phase, value in inputs:
        replays.append(scheduler.replay(phase, value))
        replays[-1].result()
    busy = sum(replay.timing.busy_s for replay in replays if replay.timing is not None)
    return time.perf_counter() - started, busy


def grpo_inputs(step: int, rows: int) -> list[tuple[Phase, Batch | int]]:
    """What the phases of a step are given, in their order."""
    sequences = _batch(rows, ())
    names = ("loss_mask", "advantages", "generation_logprobs", "prev_logprobs", "reference_logprobs")
    quanta = [(generate, _requests(sequences, part)) for part in np.array_split(np.arange(rows), QUANTA)]
    return [
        *quanta,
        (logprobs, sequences),
        (reference_logprobs, sequences),
        (train_step, _batch(rows, names)),
        (refit, step),
    ]


def _batch(rows: int, fields: Sequence[str]) -> Batch:
    """Full rows of tokens, with fields for training if there are any."""
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


def _result(kind: str, executor: str, workers: int, samples: Sequence[tuple[float, float]]) -> Result:
    table = np.asarray(samples)
    overhead = table[:, 0] - table[:, 1]
    low, middle, high = np.percentile(overhead, [25, 50, 75])
    step = float(np.median(table[:, 0]))
    return Result(
        kind, executor, workers, len(samples), step, float(np.median(table[:, 1])),
        float(middle), float(low), float(high), float(middle) / step,
    )  # fmt: skip


def print_table(results: Sequence[Result]) -> None:
    """The rows, for people."""
    from rich.console import Console
    from rich.table import Table

    title = f"grpo: a step of {QUANTA} quanta, 2 log-probabilities, 1 optimizer step, 1 refit; sft: 1 optimizer step"
    table = Table(title=title, title_justify="left")
    for name in ("kind", "workers", "executor", "step ms", "busy ms", "overhead ms", "quartiles", "share"):
        table.add_column(name, justify="right")
    for row in results:
        quartiles = f"{row.overhead_low_s * 1e3:.1f} to {row.overhead_high_s * 1e3:.1f}"
        times = [f"{seconds * 1e3:.1f}" for seconds in (row.step_s, row.busy_s, row.overhead_s)]
        table.add_row(row.kind, str(row.workers), row.executor, *times, quartiles, f"{row.share:.1%}")
    Console(width=110).print(table)


def plot(results: Sequence[Result], path: Path) -> None:
    """Overhead over the number of workers."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for executor in EXECUTORS:
        rows = [row for row in results if row.executor == executor]
        middle = [row.overhead_s * 1e3 for row in rows]
        spread = [[(row.overhead_s - row.overhead_low_s) * 1e3 for row in rows]]
        spread.append([(row.overhead_high_s - row.overhead_s) * 1e3 for row in rows])
        axes.errorbar([row.workers for row in rows], middle, yerr=spread, marker="o", capsize=3, label=executor)
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms a step", title="step less slowest workers")
    counts = sorted({row.workers for row in results})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
