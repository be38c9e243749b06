"""Compares the reference policy's weights in host memory, swapped in, with a second copy on the GPU.

    dagrl bench reference_weights [--model qwen3-0.6b] [--rows 16] [--length 1024] [--json F]

One worker on one GPU computes the same log-probabilities with the policy's weights and with the reference's, in turn, for
`policy.reference_weights` `host` and `device`. `swap_ms` is the extra time of the reference over the policy.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np

from dagrl.bench.models import SHAPES, write_model
from dagrl.bench.train_inputs import add_model_arguments, measure_and_report, one_gpu_config, single_worker, train_batch

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.runtime.shapes import Batch
    from dagrl.workers.megatron import MegatronWorker

GIB = 1 << 30


@dataclass(frozen=True)
class ReferenceRow:
    """Medians over rounds; `weights_gib` of the model, `held_gib` of GPU memory at rest, `peak_gib` with the reference in
    use."""

    where: str
    model: str
    tokens: int
    rounds: int
    weights_gib: float
    policy_ms: float
    reference_ms: float
    reference_spread_ms: float
    swap_ms: float
    held_gib: float
    peak_gib: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench reference_weights`."""
    add_model_arguments(parser, SHAPES, "qwen3-0.6b", rows=16, length=1024)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested file."""
    measure_and_report(options, measure, print_table, without_gpu="on a CPU both settings are the same")


def measure(options: argparse.Namespace, directory: Path) -> list[ReferenceRow]:
    """Measures both settings on one worker, one after the other."""
    from dagrl.runtime.shapes import Batch
    from dagrl.workers.megatron import MegatronWorker

    model = write_model(SHAPES[options.model], directory, "cuda")
    batch = train_batch(options.rows, options.length, vocabulary=150_000)
    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    with single_worker(worker_config(model, options, "host"), MegatronWorker) as worker:
        found = []
        for where in ("host", "device"):
            worker.config = worker_config(model, options, "host" if where == "host" else "device")
            worker.snapshot_reference()
            found.append(measure_one(worker, rows, where, options))
    return found


def worker_config(model: Path, options: argparse.Namespace, where: Literal["host", "device"]) -> Config:
    """Returns a configuration with BF16 weights and the reference's weights in `where`."""
    policy = {"precision": "bfloat16", "logprob_batch_size": 8, "reference_weights": where}
    return one_gpu_config(model, options.length, policy)


def measure_one(worker: MegatronWorker, rows: Batch, where: str, options: argparse.Namespace) -> ReferenceRow:
    """Measures policy and reference in turn; the first round warms up."""
    import torch

    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    taken: dict[str, list[float]] = {"policy": [], "reference": []}
    results = {}
    for _ in range(options.rounds + 1):
        for name, samples in taken.items():
            start = time.perf_counter()
            results[name] = worker.logprobs(rows, "policy" if name == "policy" else "reference")
            samples.append((time.perf_counter() - start) * 1e3)
    policy, reference = (samples[1:] for samples in taken.values())
    first, second = results["policy"], results["reference"]
    assert first is not None and second is not None
    np.testing.assert_array_equal(first["logprobs"], second["logprobs"])  # no training in between
    low, high = np.percentile(reference, [25, 75])
    return ReferenceRow(
        where=where,
        model=options.model,
        tokens=options.rows * options.length,
        rounds=options.rounds,
        weights_gib=round(sum(tensor.nbytes for tensor in worker.weight_tensors().values()) / GIB, 3),
        policy_ms=round(median(policy), 2),
        reference_ms=round(median(reference), 2),
        reference_spread_ms=round(float(high - low), 2),
        swap_ms=round(median(reference) - median(policy), 2),
        held_gib=round(held / GIB, 3),
        peak_gib=round(torch.cuda.max_memory_allocated() / GIB, 3),
    )


def print_table(rows: list[ReferenceRow]) -> None:
    """Prints the rows."""
    from rich.console import Console
    from rich.table import Table

    title = f"{rows[0].model}, {rows[0].tokens} tokens, weights {rows[0].weights_gib} GiB"
    table = Table("where", "policy ms", "reference ms", "spread", "swap ms", "held GiB", "peak GiB", title=title)
    for row in rows:
        values = (row.policy_ms, row.reference_ms, row.reference_spread_ms, row.swap_ms, row.held_gib, row.peak_gib)
        table.add_row(row.where, *map(str, values))
    Console(width=110).print(table)
