"""The reference policy's weights in host memory, swapped in, or as a second copy on the GPU: what each costs.

    dagrl bench reference_weights [--model qwen3-0.6b] [--rows 16] [--length 1024] [--json F]

One worker on one GPU computes the same log-probabilities with the policy's own weights and with the reference's, in turn,
for `policy.reference_weights` `host` and `device`. `swap_ms` is what the reference costs over the policy.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np

from bench.models import SHAPES, write_model

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.shapes import Batch
    from workers.megatron import MegatronWorker

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """Medians over rounds; `weights_gib` of the model, `held_gib` of GPU memory at rest, `peak_gib` under the reference."""

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
    """The options of `dagrl bench reference_weights`."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=16, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file")


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    from bench.train_inputs import measure_and_report

    measure_and_report(options, measure, print_table, without_gpu="without one both ways are the same")


def measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    """Both ways on one worker, one after the other."""
    from bench.train_inputs import single_worker, train_batch
    from dagrl.shapes import Batch
    from workers.megatron import MegatronWorker

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
    """BF16 weights on one GPU."""
    from dagrl.config import Config

    policy = {
        "model_name": str(model),
        "precision": "bfloat16",
        "logprob_batch_size": 8,
        "max_total_sequence_length": options.length,
        "reference_weights": where,
    }
    return Config.model_validate({"name": "reference", "algorithm": "sft", "data": {}, "policy": policy})


def measure_one(worker: MegatronWorker, rows: Batch, where: str, options: argparse.Namespace) -> Row:
    """Policy and reference in turn; the first round warms up."""
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
    np.testing.assert_array_equal(first["logprobs"], second["logprobs"])  # nothing was trained in between
    low, high = np.percentile(reference, [25, 75])
    return Row(
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


def print_table(rows: list[Row]) -> None:
    """The rows, for people."""
    from rich.console import Console
    from rich.table import Table

    title = f"{rows[0].model}, {rows[0].tokens} tokens, weights {rows[0].weights_gib} GiB"
    table = Table("where", "policy ms", "reference ms", "spread", "swap ms", "held GiB", "peak GiB", title=title)
    for row in rows:
        values = (row.policy_ms, row.reference_ms, row.reference_spread_ms, row.swap_ms, row.held_gib, row.peak_gib)
        table.add_row(row.where, *map(str, values))
    Console(width=110).print(table)
