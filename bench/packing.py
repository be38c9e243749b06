"""Padding, dynamic microbatches and sequence packing, side by side on the same batch of a long-tailed length distribution.

    dagrl bench packing [--model tiny | qwen3-0.6b | qwen3-4b] [--json F]       the first on any CPU, the others on a GPU

One worker takes the same optimizer steps, and computes the same log-probabilities, in three ways in turn: rows padded to
the longest of the batch, `policy.dynamic_batching`, and `policy.sequence_packing`. All have the same budget of tokens for a
microbatch, `--micro` rows of `--length`. Lengths are log-normal, cut at `--length`. The losses must agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.models import SHAPES, Shape, write_model

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.shapes import Batch
    from workers.megatron import MegatronWorker

TINY = Shape(
    "tiny",
    {
        **SHAPES["qwen3-0.6b"].config,
        "vocab_size": 4096,
        "head_dim": 64,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
    },
)
MODELS: Mapping[str, Shape] = {"tiny": TINY, **SHAPES}
WAYS: Mapping[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {"dynamic_batching": {"enabled": True}},
    "packed": {"sequence_packing": {"enabled": True}},
}


@dataclass(frozen=True)
class Row:
    """Medians over rounds; spreads are differences of the quartiles; speedups are over padding.

    `padding_share` is of what the model was given in a step; `peak_gib` of GPU memory in a step, 0 on a CPU.
    """

    way: str
    model: str
    precision: str
    sequences: int
    tokens: int
    longest: int
    median_length: int
    rounds: int
    padding_share: float
    train_ms: float
    train_spread_ms: float
    logprobs_ms: float
    logprobs_spread_ms: float
    tokens_per_second: float
    train_speedup: float
    logprobs_speedup: float
    peak_gib: float
    loss: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench packing`."""
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 without")
    parser.add_argument("--rows", type=int, default=32, help="sequences of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest sequence")
    parser.add_argument("--median", type=float, default=80.0, help="of the log-normal lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--micro", type=int, default=4, help="padded sequences of a microbatch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file")


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    import torch

    from bench.train_inputs import measure_and_report

    options.precision = options.precision or ("bfloat16" if torch.cuda.is_available() else "float32")
    measure_and_report(options, measure, print_table)


def measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    """All ways in every round, on one worker."""
    import torch

    from bench.train_inputs import single_worker
    from workers.megatron import MegatronWorker

    shape = MODELS[options.model]
    shape = shape.with_layers(options.layers) if options.layers else shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = write_model(shape, directory, device, options.precision)
    batch = long_tailed_batch(options)
    configs = {way: worker_config(model, options, policy) for way, policy in WAYS.items()}
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with single_worker(configs["padded"], MegatronWorker) as worker:
        losses = {way: evaluate(worker, config, batch) for way, config in configs.items()}
        assert np.ptp(list(losses.values())) < (1e-2 if options.precision == "bfloat16" else 1e-5), losses
        for number in range(options.rounds + 1):
            for way, config in configs.items():
                worker.config = config
                taken = one_step(worker, batch)
                if number:  # the first round compiles kernels and allocates memory
                    samples[way].append(taken)
    return [as_row(way, shape.name, options, batch, samples, losses[way]) for way in WAYS]


def long_tailed_batch(options: argparse.Namespace) -> Batch:
    """Random tokens; the first quarter of each sequence is its prompt, without loss."""
    from dagrl.shapes import Batch

    generator = np.random.default_rng(0)
    lengths = (
        generator.lognormal(np.log(options.median), options.sigma, options.rows).clip(4, options.length).astype(np.int64)
    )
    positions = np.arange(lengths.max())[None, :]  # the smallest bucket that holds the batch
    inside = positions < lengths[:, None]
    mask = (inside & (positions >= np.maximum(1, lengths // 4)[:, None])).astype(np.float32)
    fields = {
        "tokens": generator.integers(0, 4096, inside.shape) * inside,
        "lengths": lengths,
        "loss_mask": mask,
    }
    return Batch(fields, {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(options.rows)})


def worker_config(model: Path, options: argparse.Namespace, policy: dict[str, Any]) -> Config:
    """One way to cut the batch into microbatches."""
    from dagrl.config import Config

    section = {
        "model_name": str(model),
        "precision": options.precision,
        "train_micro_batch_size": options.micro,
        "logprob_batch_size": options.micro,
        "max_total_sequence_length": options.length,
        **policy,
    }
    return Config.model_validate({"name": "packing", "algorithm": "sft", "data": {}, "policy": section})


def evaluate(worker: MegatronWorker, config: Config, batch: Batch) -> float:
    """The loss of the batch at the worker's weights."""
    worker.config = config
    return worker.evaluate(batch, "sft").flat()["loss"]


def one_step(worker: MegatronWorker, batch: Batch) -> dict[str, float]:
    """Seconds of an optimizer step and of log-probabilities, the share of padding, and the step's peak in GiB."""
    import torch

    from dagrl.shapes import Batch

    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    logprobs, _ = timed(lambda: worker.logprobs(rows))
    train, metrics = timed(lambda: worker.train_step(batch, "sft"))
    peak = torch.cuda.max_memory_allocated() / (1 << 30) if gpu else 0.0
    padding = metrics.flat()["microbatch_padding_share"]
    return {"logprobs": logprobs, "train": train, "padding": padding, "peak": peak}


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until `action` returns, and what it returned; a worker's phases wait for the GPU themselves."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def as_row(
    way: str,
    model: str,
    options: argparse.Namespace,
    batch: Batch,
    samples: Mapping[str, list[dict[str, float]]],
    loss: float,
) -> Row:
    """One row from the samples of a way."""

    def values(name: str, of: str = way) -> list[float]:
        return [sample[name] for sample in samples[of]]

    def spread(name: str) -> float:
        low, high = np.percentile(values(name), [25, 75])
        return round(float(high - low) * 1e3, 2)

    tokens = int(batch["lengths"].sum())
    return Row(
        way=way,
        model=model,
        precision=options.precision,
        sequences=options.rows,
        tokens=tokens,
        longest=int(batch["lengths"].max()),
        median_length=int(np.median(batch["lengths"])),
        rounds=len(samples[way]),
        padding_share=round(median(values("padding")), 4),
        train_ms=round(median(values("train")) * 1e3, 2),
        train_spread_ms=spread("train"),
        logprobs_ms=round(median(values("logprobs")) * 1e3, 2),
        logprobs_spread_ms=spread("logprobs"),
        tokens_per_second=round(tokens / median(values("train")), 1),
        train_speedup=round(median(values("train", "padded")) / median(values("train")), 3),
        logprobs_speedup=round(median(values("logprobs", "padded")) / median(values("logprobs")), 3),
        peak_gib=round(max(values("peak")), 2),
        loss=loss,
    )


def print_table(rows: list[Row]) -> None:
    """The rows, for people."""
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    title = (
        f"{first.model}, {first.precision}: {first.sequences} sequences, {first.tokens} tokens, the longest {first.longest}"
    )
    table = Table("way", "padding", "train ms", "x", "logprobs ms", "x", "tokens/s", "peak GiB", "loss", title=title)
    for row in rows:
        train, logprobs = f"{row.train_ms} ({row.train_spread_ms})", f"{row.logprobs_ms} ({row.logprobs_spread_ms})"
        speeds = (f"{row.train_speedup:.2f}", logprobs, f"{row.logprobs_speedup:.2f}")
        values = (f"{row.padding_share:.1%}", train, *speeds, f"{row.tokens_per_second:.0f}", f"{row.peak_gib}")
        table.add_row(row.way, *values, f"{row.loss:.5f}")
    Console(width=120).print(table)
