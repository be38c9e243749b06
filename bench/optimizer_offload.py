"""Optimizer state that leaves the GPU while log-probabilities are computed: what it costs, and what memory it frees.

    dagrl bench optimizer_offload [--model qwen3-0.6b] [--rows 16] [--length 2048] [--json F]

One worker on one GPU takes the same steps in three ways, in turn: `off` (the state stays), `on`
(`policy.offload_optimizer_for_logprob`), and `blocking`, a plain copy of every tensor by `.to("cpu")` and back. A step is
logprob_inference_prep, log-probabilities, training_prep, and an optimizer step; `prep_ms` is the time of both preparations
as the caller sees it, `step_ms` the whole step: what `on` does not hide is in the difference to `off`. Peaks are of memory
that kernels or copies may still use (torch's active bytes). Where there is room, log-probabilities begin before the copies
are done; so `fits` says what matters: whether they run with half of the state's memory taken away from what `off` needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.models import SHAPES, write_model

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.config import Config
    from dagrl.shapes import Batch
    from workers.megatron import MegatronWorker

WAYS = ("off", "on", "blocking")
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """Medians over rounds, in milliseconds and GiB; `spread_ms` is of `step_ms` (difference of the quartiles)."""

    way: str
    model: str
    tokens: int
    state_gib: float
    rounds: int
    logprob_inference_prep_ms: float
    training_prep_ms: float
    prep_ms: float
    logprobs_ms: float
    train_ms: float
    step_ms: float
    spread_ms: float
    device_allocations: float
    logprobs_peak_gib: float
    step_peak_gib: float
    limit_gib: float
    fits: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench optimizer_offload`."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--micro", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each way in a turn that count; blocking: 2")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path, help="write the rows to this file")


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    from bench.train_inputs import measure_and_report

    measure_and_report(options, measure, print_table, without_gpu="it measures copies between a GPU and the host")


def measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    """All ways in every round, on one worker."""
    from bench.train_inputs import single_worker, train_batch
    from workers.megatron import MegatronWorker

    config = worker_config(write_model(SHAPES[options.model], directory, "cuda"), options)
    batch = train_batch(options.rows, options.length, vocabulary=150_000)
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    with single_worker(config, MegatronWorker) as worker:
        for _ in range(options.turns):
            for way in options.ways:
                steps = options.rounds if way != "blocking" else 2
                taken = [one_step(worker, batch, way) for _ in range(steps + 1)]
                samples[way] += taken[1:]  # the first one finds memory as the way before left it
        state = worker._ready().offloader.nbytes("optimizer")
        limit = int(median(sample["logprobs_peak"] for sample in samples["off"]) * GIB) - state // 2
        fits = {way: runs_within(worker, batch, way, limit) for way in options.ways}
    return [as_row(way, options, state / GIB, samples[way], limit / GIB, fits[way]) for way in options.ways]


def runs_within(worker: MegatronWorker, batch: Batch, way: str, limit: int) -> bool:
    """Whether log-probabilities run, after the way's preparation, with at most `limit` bytes of GPU memory."""
    import torch

    before, after = preparations(worker, way)
    before()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        worker.logprobs(rows_of(batch))
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        after()
        worker.train_step(batch, "sft")


def worker_config(model: Path, options: argparse.Namespace) -> Config:
    """BF16 weights with float32 master weights on one GPU."""
    from dagrl.config import Config

    policy = {
        "model_name": str(model),
        "precision": "bfloat16",
        "train_micro_batch_size": options.micro,
        "logprob_batch_size": options.micro,
        "max_total_sequence_length": options.length,
    }
    return Config.model_validate({"name": "offload", "algorithm": "sft", "data": {}, "policy": policy})


def one_step(worker: MegatronWorker, batch: Batch, way: str) -> dict[str, float]:
    """Seconds of each part, and peaks in GiB."""
    import torch

    before, after = preparations(worker, way)
    rows = rows_of(batch)
    found: dict[str, float] = {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocations = device_allocations()
    start = time.perf_counter()
    found["logprob_inference_prep"] = timed(before)
    torch.cuda.reset_peak_memory_stats()
    found["logprobs"] = timed(lambda: worker.logprobs(rows))
    found["logprobs_peak"] = active_peak()
    found["training_prep"] = timed(after)
    found["train"] = timed(lambda: worker.train_step(batch, "sft"))
    torch.cuda.synchronize()
    found["step"] = time.perf_counter() - start
    found["device_allocations"] = device_allocations() - allocations
    found["step_peak"] = max(found["logprobs_peak"], active_peak())
    return found


def preparations(worker: MegatronWorker, way: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """What comes before the log-probabilities, and after them."""
    if way == "off":
        return (lambda: None), (lambda: None)
    if way == "on":
        return (lambda: worker.prepare_for_logprobs(0)), (lambda: worker.prepare_for_training(0))
    copies: list[Tensor] = []
    tensors = worker._ready().optimizer_tensors()

    def leave() -> None:
        for tensor in tensors:
            copies.append(tensor.to("cpu"))
            tensor.untyped_storage().resize_(0)

    def come_back() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy)

    return leave, come_back


def rows_of(batch: Batch) -> Batch:
    """What log-probabilities need of a batch."""
    from dagrl.shapes import Batch

    return Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})


def device_allocations() -> float:
    """Times that torch asked the driver for memory, which is slow."""
    import torch

    return float(torch.cuda.memory_stats()["num_device_alloc"])


def timed(action: Callable[[], object]) -> float:
    """Seconds until `action` returns."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def active_peak() -> float:
    """GiB of memory that was in use at most, until the last kernel or copy that uses it is done."""
    import torch

    return float(torch.cuda.memory_stats()["active_bytes.all.peak"]) / GIB


def as_row(
    way: str, options: argparse.Namespace, state: float, samples: list[dict[str, float]], limit: float, fits: bool
) -> Row:
    """One row from the samples of a way."""
    import numpy as np

    def middle(*names: str) -> float:
        return round(median(sum(sample[name] for name in names) for sample in samples) * 1e3, 2)

    low, high = np.percentile([sample["step"] for sample in samples], [25, 75])
    return Row(
        way=way,
        model=options.model,
        tokens=options.rows * options.length,
        state_gib=round(state, 2),
        rounds=len(samples),
        logprob_inference_prep_ms=middle("logprob_inference_prep"),
        training_prep_ms=middle("training_prep"),
        prep_ms=middle("logprob_inference_prep", "training_prep"),
        logprobs_ms=middle("logprobs"),
        train_ms=middle("train"),
        step_ms=middle("step"),
        spread_ms=round(float(high - low) * 1e3, 2),
        device_allocations=median(sample["device_allocations"] for sample in samples),
        logprobs_peak_gib=round(max(sample["logprobs_peak"] for sample in samples), 2),
        step_peak_gib=round(max(sample["step_peak"] for sample in samples), 2),
        limit_gib=round(limit, 2),
        fits=fits,
    )


def print_table(rows: list[Row]) -> None:
    """The rows, for people."""
    from rich.console import Console
    from rich.table import Table

    head = f"{rows[0].model}, {rows[0].tokens} tokens a step, optimizer state {rows[0].state_gib} GiB"
    fits = f"fits {rows[0].limit_gib} GiB"
    table = Table("way", "prep ms", "logprobs ms", "train ms", "step ms", "spread", "allocs", "peak GiB", fits, title=head)
    for row in rows:
        times = (row.prep_ms, row.logprobs_ms, row.train_ms, row.step_ms, row.spread_ms, row.device_allocations)
        table.add_row(row.way, *map(str, times), f"{row.logprobs_peak_gib} {row.step_peak_gib}", str(row.fits))
    Console(width=120).print(table)
