"""Compares training steps through dagrl with a plain Megatron loop: throughput, MFU, memory, and equal losses.

    dagrl bench train --cases 0.6b:dp1 0.6b:tp2 [--rows 16] [--length 2048] [--micro 2] [--packed] [--json F] [--plot F]
    dagrl bench train --cases '0.6b:dp1!' --micro 8 --parts     where the GPU's time in a step goes
    dagrl bench train --cases '4b:dp1!' --length 16384 --rows 2 --micro 1 --recompute 14     long sequences
    dagrl bench train --cases '4b@18:dp1!' --checkpoints DIR    what a background checkpoint costs, written below DIR

A case is a model and a layout: `0.6b:tp2pp2`, `4b:tp4`, `30b@6:dp4ep4` (a model shortened to 6 layers). Suffixes:
`0.6b:dp2d` uses the distributed optimizer; `0.6b:dp1m` gives the plain loop Megatron's cross-entropy instead of the loss of
dagrl's worker; `0.6b:tp2g` replays microbatches as CUDA graphs; `4b:dp1f` computes in FP8, `4b:dp1fb` in blocks;
`4b:dp1n` never uses Transformer Engine; `4b:dp1!` leaves out the plain loop; `4b:dp1:lora` trains adapters, without a plain
loop. dagrl's workers under Ray and the plain loop's processes
(`dagrl.bench.train_plain`) run at the same time, build the case from the same checkpoint, and take turns of
a few steps. Weights are random, of the real shape, in bfloat16 with float32 master weights. dagrl's time is a whole replay:
it sends the batch and reads the metrics. The plain loop's step starts with its batch on the device. Losses are compared, by
relative norm, with those of the model's first case on one GPU. `--tiny` also runs without GPUs, to try the benchmark.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from dagrl.bench.deadline import BenchDeadline, add_deadline
from dagrl.bench.models import SHAPES, ModelShape, write_model
from dagrl.bench.report import Row, add_outputs, count, drawing, hardware, print_rows, report_rows
from dagrl.bench.train_checkpoint import checkpoint_stalls, print_stalls
from dagrl.bench.train_inputs import train_batch
from dagrl.bench.train_parts import HEAD, print_parts
from dagrl.bench.train_rivals import DagrlSteps, PlainSteps
from dagrl.config import Config
from dagrl.errors import ConfigError, RunError
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.workers.megatron.architecture import read_architecture
from dagrl.workers.megatron.flops import peak_tflops, step_tflop

MODELS = {"0.6b": "qwen3-0.6b", "4b": "qwen3-4b", "8b": "qwen3-8b", "30b": "qwen3-30b-a3b"}
_CASE = re.compile(
    r"(?P<model>[0-9.]+b)(@(?P<layers>\d+))?:(?P<layout>((dp|tp|pp|cp|ep)\d+)+)(?P<end>d?m?g?(fb?)?n?)(?P<lora>:lora)?(?P<alone>!?)"
)
_SIZE = re.compile(r"(dp|tp|pp|cp|ep)(\d+)")


@dataclass(frozen=True)
class TrainCase:
    """A model in a layout. `own_loss`: the plain loop uses Megatron's loss. `alone`: no plain loop, to save memory.

    `lora`: dagrl's workers train adapters on all linear layers, and there is no plain loop. `graphs`: dagrl's workers
    replay microbatches as CUDA graphs; the plain loop does not. `float8`: both compute in FP8, `blockwise`: in blocks.
    `own_kernels`: neither uses Transformer Engine.
    """

    name: str
    shape: ModelShape
    layout: ParallelLayout
    sharded: bool
    own_loss: bool
    graphs: bool
    float8: bool
    blockwise: bool
    own_kernels: bool
    lora: bool
    alone: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", default=["0.6b:dp1"], metavar="MODEL:LAYOUT", help="cases to measure")
    parser.add_argument("--rows", type=count, default=16, help="sequences per step, over all workers")
    parser.add_argument("--length", type=count, default=2048, help="tokens per sequence")
    parser.add_argument("--micro", type=count, default=2, help="sequences per microbatch")
    parser.add_argument("--steps", type=count, default=3, help="steps per turn")
    parser.add_argument("--turns", type=count, default=2, help="turns per case")
    parser.add_argument("--recompute", type=int, default=0, help="layers whose activations the backward pass computes again")
    parser.add_argument("--packed", action="store_true", help="pack sequences, as runs on GPUs do")
    parser.add_argument("--parts", action="store_true", help="also profile a step of dagrl's, on one GPU")
    parser.add_argument(
        "--checkpoints", type=Path, help="also save two background checkpoints of dagrl's below this directory"
    )
    add_deadline(parser)
    parser.add_argument("--tiny", action="store_true", help="two narrow layers and a small vocabulary, in float32")
    add_outputs(parser)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested files. Raises RunError if a case failed."""
    cases = [parse_case(text, options.tiny) for text in options.cases]
    if options.parts:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("found no GPU; --parts profiles the kernels of one")
    deadline, problems = BenchDeadline(options.deadline), dict[str, str]()
    measured = measure_all(cases, options, deadline, problems)
    report_rows(options, measured, partial(print_table, problems=problems), plot, deadline=deadline, failed=problems)
    if problems:
        raise RunError(f"{len(problems)} of {len(cases)} cases failed, see above: {', '.join(problems)}")


def measure_all(
    cases: Sequence[TrainCase], options: argparse.Namespace, deadline: BenchDeadline, problems: dict[str, str]
) -> Iterator[list[Row]]:
    """Measures every case that the deadline allows; yields all rows so far. The traceback of a case that failed is in
    `problems`."""
    rows: list[Row] = []
    workers = max(case.layout.world_size for case in cases)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = writing(cases, options, directory, stack)
        plain = stack.enter_context(PlainSteps(workers, directory))
        ours = stack.enter_context(DagrlSteps(workers))
        plain.connect()
        wait(models.values())
        for case in deadline.each(cases, lambda case: case.name):
            try:
                rows += measure(case, options, models[case.shape.name].result(), ours, plain)
            except Exception:  # reported; the next case may still run
                problems[case.name] = traceback.format_exc()
            rows = compared(rows)
            yield rows


def parse_case(text: str, tiny: bool) -> TrainCase:
    """Parses a case's name. Raises ConfigError if it is malformed or names an unknown model."""
    match = _CASE.fullmatch(text)
    if match is None or match["model"] not in MODELS:
        raise ConfigError(f"case {text!r}: expected MODEL:LAYOUT, e.g. 0.6b:tp2pp2; models: {', '.join(MODELS)}")
    shape = SHAPES[MODELS[match["model"]]]
    shape = shape.narrowed() if tiny else shape
    shape = shape.with_layers(int(match["layers"])) if match["layers"] else shape
    sizes = {name: int(size) for name, size in _SIZE.findall(match["layout"])}
    layout = ParallelLayout(**sizes, etp=1) if "ep" in sizes else ParallelLayout(**sizes)
    sharded, own_loss, graphs, float8, blockwise, own_kernels = (mark in match["end"] for mark in "dmgfbn")
    lora, alone = bool(match["lora"]), bool(match["alone"] or match["lora"])
    return TrainCase(text.rstrip("!"), shape, layout, sharded, own_loss, graphs, float8, blockwise, own_kernels, lora, alone)


def writing(
    cases: Sequence[TrainCase], options: argparse.Namespace, directory: Path, stack: ExitStack
) -> dict[str, Future[Path]]:
    """Writes all models' checkpoints in a thread while workers start; returns their paths by name."""
    dtype = "float32" if options.tiny else "bfloat16"
    pool = stack.enter_context(ThreadPoolExecutor(1))
    shapes = {case.shape.name: case.shape for case in cases}
    return {name: pool.submit(write_model, shape, directory, dtype) for name, shape in shapes.items()}


def measure(case: TrainCase, options: argparse.Namespace, model: Path, ours: DagrlSteps, plain: PlainSteps) -> list[Row]:
    """Returns the rows of dagrl and, unless the case is `alone`, of the plain loop. Both build the case before the first
    turn."""
    config = case_config(case, model, options)
    batch = train_batch(options.rows, options.length, vocabulary=int(str(case.shape.config["vocab_size"])))
    plain.chunked = not case.own_loss
    contenders: list[DagrlSteps | PlainSteps] = [ours] if case.alone else [ours, plain]
    for contender in contenders:
        contender.begin(case.layout, config, batch)
    for contender in contenders:
        contender.ready()
    try:
        for contender in contenders:
            contender.take(1)  # choose kernels, allocate memory
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for _ in range(options.turns):
            for contender in contenders:
                seconds[contender.name] += contender.take(options.steps)
        rows = [as_row(case, contender, seconds[contender.name], batch, config, ours) for contender in contenders]
        if options.checkpoints:
            stalls = checkpoint_stalls(ours, rows[0]["step_ms"] / 1e3, options.checkpoints)
            print_stalls(case.name, stalls)
            rows[0] = {**rows[0], "stalls": stalls}
        return profiled(rows, ours, case, batch) if options.parts and case.layout.world_size == 1 else rows
    finally:
        for contender in contenders:
            contender.end()


def profiled(rows: Sequence[Row], ours: DagrlSteps, case: TrainCase, batch: Batch) -> list[Row]:
    """Adds the kernels of a step of dagrl's, the first row, and the MFU of its layers, and prints them.

    `parts_ms` is the time of the kernels by kind, `layers_mfu` the MFU of the step less its output layer.
    """
    parts, row = ours.parts(), rows[0]
    layers_ms = row["step_ms"] - sum(parts.parts_ms.get(kind, 0.0) for kind in HEAD)
    headless = step_tflop(replace(read_architecture(case.shape.config), vocabulary=0), batch["lengths"])
    rate = headless / (layers_ms / 1e3) / row["model_tflops_per_gpu"]
    layers_mfu = None if row["mfu"] is None else round(row["mfu"] * rate, 4)
    print_parts(row["case"], parts, row["step_ms"], layers_mfu)
    return [{**row, "parts_ms": parts.parts_ms, "layers_mfu": layers_mfu}, *rows[1:]]


def case_config(case: TrainCase, model: Path, options: argparse.Namespace) -> Config:
    """Returns the configuration that both read."""
    megatron: dict[str, object] = {
        "sequence_parallel": case.layout.tp > 1,
        "cuda_graphs": case.graphs,
        "fp8_cfg": {"enabled": case.float8, "fp8_recipe": "blockwise" if case.blockwise else "tensorwise"},
        "transformer_engine": "never" if case.own_kernels else "auto",
        "peft": {"enabled": case.lora},
        "optimizer": {"lr": 1e-5, "use_distributed_optimizer": case.sharded},
    }
    policy: dict[str, object] = {
        "model_name": str(model),
        "precision": "float32" if options.tiny else "bfloat16",
        "train_global_batch_size": options.rows,
        "train_micro_batch_size": min(options.micro, options.rows // case.layout.dp),
        "max_total_sequence_length": options.length,
        "megatron_cfg": megatron,
    }
    if options.recompute:
        layers = {"recompute_method": "block", "recompute_num_layers": options.recompute}
        megatron |= {"activation_checkpointing": True, **layers}
    if options.packed:
        policy["sequence_packing"] = {"enabled": True, "train_mb_tokens": options.micro * options.length}
    return Config.model_validate({"name": "train", "algorithm": "sft", "data": {}, "policy": policy})


def as_row(
    case: TrainCase, by: DagrlSteps | PlainSteps, seconds: Sequence[float], batch: Batch, config: Config, ours: DagrlSteps
) -> Row:
    """Returns the row of one contender: medians in milliseconds, spread (interquartile range), peaks in GiB.

    `overhead_ms` is the part of dagrl's step in which none of its workers ran.
    """
    low, middle, high = np.percentile(seconds, [25, 50, 75]).tolist()
    gpus, tokens = case.layout.world_size, int(batch["lengths"].sum())
    tflops = float(step_tflop(read_architecture(case.shape.config), batch["lengths"])) / middle / gpus
    peak = peak_tflops(ours.device_name, config.policy.precision)
    return {
        "case": case.name,
        "who": by.name,
        "gpus": gpus,
        "tokens": tokens,
        "steps": len(seconds),
        "step_ms": round(middle * 1e3, 2),
        "spread_ms": round((high - low) * 1e3, 2),
        "overhead_ms": round(median(by.overheads) * 1e3, 2) if by.overheads else None,
        "tokens_per_s": round(tokens / middle, 1),
        "tokens_per_s_per_gpu": round(tokens / middle / gpus, 1),
        "model_tflops_per_gpu": round(tflops, 2),
        "mfu": None if peak is None else round(tflops / peak, 4),
        "peak_gib": round(by.peak_bytes() / (1 << 30), 2),
        "losses": by.losses,
    }


def compared(rows: Sequence[Row]) -> list[Row]:
    """Fills in `loss_error`, against one GPU, and `of_plain`, against the plain loop."""
    whole = [row for row in rows if not row["case"].endswith(":lora")]
    single = {_model(row): row for row in reversed(whole) if row["gpus"] == 1 and row["who"] == "dagrl"}
    plain = {row["case"]: row for row in rows if row["who"] == "plain"}
    found = []
    for row in rows:
        truth, rival = single.get(_model(row)), plain.get(row["case"])
        error = None
        if truth is not None and row is not truth and row in whole:
            steps = min(len(row["losses"]), len(truth["losses"]))
            expected = np.array(truth["losses"][:steps])
            error = float(f"{np.linalg.norm(row['losses'][:steps] - expected) / np.linalg.norm(expected):.2e}")
        ratio = round(row["step_ms"] / rival["step_ms"], 4) if rival is not None else None
        found.append({**row, "loss_error": error, "of_plain": ratio})
    return found


def _model(row: Row) -> str:
    return str(row["case"]).split(":")[0]


def print_table(rows: Sequence[Row], problems: Mapping[str, str]) -> None:
    """Prints the rows and the failures."""
    columns = "case, who, step ms, spread, overhead ms, of plain, tokens/s/GPU, TFLOP/s/GPU, MFU, peak GiB, loss error"
    names = "case who step_ms spread_ms overhead_ms of_plain tokens_per_s_per_gpu model_tflops_per_gpu".split()
    lines = ((*(row[name] for name in names), _mfu(row), row["peak_gib"], row["loss_error"]) for row in rows)
    print_rows(columns.split(", "), lines, hardware())
    for case, problem in problems.items():
        sys.stdout.write(f"{case}:\n{problem}\n")


def _mfu(row: Row) -> str:
    return "" if row["mfu"] is None else f"{row['mfu']:.1%}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots tokens per second and GPU, with the MFU next to each bar."""
    with drawing(path, figsize=(8, 0.45 * len(rows) + 1.2)) as (_, ((axes,),)):
        names = [f"{row['case']} {row['who']}" for row in rows]
        colors = ["#4477aa" if row["who"] == "dagrl" else "#bbbbbb" for row in rows]
        bars = axes.barh(names, [row["tokens_per_s_per_gpu"] for row in rows], color=colors)
        axes.bar_label(bars, [_mfu(row) for row in rows], padding=3, fontsize=8)
        axes.set(xlabel="tokens/s/GPU (next to the bars: MFU)", title=hardware())
        axes.invert_yaxis()
