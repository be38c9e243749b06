"""Compares padding, dynamic microbatches and sequence packing on one batch with long-tailed lengths.

    dagrl bench packing [--model tiny | qwen3-0.6b | qwen3-4b] [--json F]       tiny: any CPU; the others: a GPU

One worker takes the same optimizer steps and computes the same log-probabilities in three variants, in turn: rows padded to
the longest of the batch, `policy.dynamic_batching` and `policy.sequence_packing`. All have the same token budget per
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

from dagrl.bench.models import SHAPES, ModelShape, write_model
from dagrl.bench.train_inputs import add_model_arguments, measure_and_report, one_gpu_config, single_worker

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.runtime.shapes import Batch
    from dagrl.workers.megatron import MegatronWorker

TINY = ModelShape(
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
MODELS: Mapping[str, ModelShape] = {"tiny": TINY, **SHAPES}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {"dynamic_batching": {"enabled": True}},
    "packed": {"sequence_packing": {"enabled": True}},
}


@dataclass(frozen=True)
class PackingRow:
    """Medians over rounds; spreads are interquartile ranges; speedups are over padding.

    `padding_share` is the share of padding in the model's input per step. `peak_gib` is GPU memory per step, 0 on a CPU.
    """

    variant: str
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
    """Adds the options of `dagrl bench packing`."""
    add_model_arguments(parser, MODELS, "tiny", rows=32, length=512)
    parser.add_argument("--layers", type=int, help="shorten the model to this many layers")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--median", type=float, default=80.0, help="median of the log-normal lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the lengths' logarithm")
    parser.add_argument("--micro", type=int, default=4, help="padded sequences per microbatch")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested file."""
    import torch

    options.precision = options.precision or ("bfloat16" if torch.cuda.is_available() else "float32")
    measure_and_report(options, measure, print_table)


def measure(options: argparse.Namespace, directory: Path) -> list[PackingRow]:
    """Measures all variants in every round, on one worker."""
    import torch

    from dagrl.workers.megatron import MegatronWorker

    shape = MODELS[options.model]
    shape = shape.with_layers(options.layers) if options.layers else shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = write_model(shape, directory, device, options.precision)
    batch = long_tailed_batch(options)
    configs = {variant: worker_config(model, options, policy) for variant, policy in VARIANTS.items()}
    samples: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with single_worker(configs["padded"], MegatronWorker) as worker:
        losses = {variant: evaluate(worker, config, batch) for variant, config in configs.items()}
        assert np.ptp(list(losses.values())) < (1e-2 if options.precision == "bfloat16" else 1e-5), losses
        for number in range(options.rounds + 1):
            for variant, config in configs.items():
                worker.config = config
                taken = one_step(worker, batch)
                if number:  # the first round compiles kernels and allocates memory
                    samples[variant].append(taken)
    return [as_row(variant, shape.name, options, batch, samples, losses[variant]) for variant in VARIANTS]


def long_tailed_batch(options: argparse.Namespace) -> Batch:
    """Returns random tokens; the first quarter of each sequence is its prompt, without loss."""
    from dagrl.runtime.shapes import Batch

    generator = np.random.default_rng(0)
    lengths = (
        generator.lognormal(np.log(options.median), options.sigma, options.rows).clip(4, options.length).astype(np.int64)
    )
    positions = np.arange(lengths.max())[None, :]  # the batch's smallest bucket
    inside = positions < lengths[:, None]
    mask = (inside & (positions >= np.maximum(1, lengths // 4)[:, None])).astype(np.float32)
    fields = {
        "tokens": generator.integers(0, 4096, inside.shape) * inside,
        "lengths": lengths,
        "loss_mask": mask,
    }
    return Batch(fields, {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(options.rows)})


def worker_config(model: Path, options: argparse.Namespace, policy: dict[str, Any]) -> Config:
    """Returns a configuration with one way to cut the batch into microbatches."""
    batches = {"train_micro_batch_size": options.micro, "logprob_batch_size": options.micro}
    return one_gpu_config(model, options.length, {"precision": options.precision, **batches, **policy})


def evaluate(worker: MegatronWorker, config: Config, batch: Batch) -> float:
    """Returns the loss of the batch at the worker's weights."""
    worker.config = config
    return worker.evaluate(batch, "likelihood").flat()["loss"]


def one_step(worker: MegatronWorker, batch: Batch) -> dict[str, float]:
    """Returns seconds of an optimizer step and of log-probabilities, the share of padding, and the step's peak in GiB."""
    import torch

    from dagrl.runtime.shapes import Batch

    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    logprobs, _ = timed(lambda: worker.logprobs(rows))
    train, metrics = timed(lambda: worker.train_step(batch, "likelihood"))
    peak = torch.cuda.max_memory_allocated() / (1 << 30) if gpu else 0.0
    padding = metrics.flat()["microbatch_padding_share"]
    return {"logprobs": logprobs, "train": train, "padding": padding, "peak": peak}


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds until `action` returns, and its result; a worker's phases synchronize with the GPU themselves."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def as_row(
    variant: str,
    model: str,
    options: argparse.Namespace,
    batch: Batch,
    samples: Mapping[str, list[dict[str, float]]],
    loss: float,
) -> PackingRow:
    """Returns one row from a variant's samples."""

    def values(name: str, of: str = variant) -> list[float]:
        return [sample[name] for sample in samples[of]]

    def spread(name: str) -> float:
        low, high = np.percentile(values(name), [25, 75])
        return round(float(high - low) * 1e3, 2)

    tokens = int(batch["lengths"].sum())
    return PackingRow(
        variant=variant,
        model=model,
        precision=options.precision,
        sequences=options.rows,
        tokens=tokens,
        longest=int(batch["lengths"].max()),
        median_length=int(np.median(batch["lengths"])),
        rounds=len(samples[variant]),
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


def print_table(rows: list[PackingRow]) -> None:
    """Prints the rows."""
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    title = (
        f"{first.model}, {first.precision}: {first.sequences} sequences, {first.tokens} tokens, the longest {first.longest}"
    )
    table = Table("variant", "padding", "train ms", "x", "logprobs ms", "x", "tokens/s", "peak GiB", "loss", title=title)
    for row in rows:
        train, logprobs = f"{row.train_ms} ({row.train_spread_ms})", f"{row.logprobs_ms} ({row.logprobs_spread_ms})"
        speeds = (f"{row.train_speedup:.2f}", logprobs, f"{row.logprobs_speedup:.2f}")
        values = (f"{row.padding_share:.1%}", train, *speeds, f"{row.tokens_per_second:.0f}", f"{row.peak_gib}")
        table.add_row(row.variant, *values, f"{row.loss:.5f}")
    Console(width=120).print(table)
