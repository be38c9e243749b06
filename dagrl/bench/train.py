"""Compares SFT steps of `dagrl train` with a plain Megatron loop: time, MFU, memory, and equal losses.

    dagrl bench train --cases 0.6b:dp1 0.6b:tp2 4b:tp4 [--rows 16] [--length 2048] [--micro 2] [--json F]
    dagrl bench train --cases 8b@28:dp1 --sides dagrl                                      dagrl alone

A case is a model and a layout, `4b:tp2pp2` or `30b@6:dp4ep4` (shortened to 6 layers), with keys that both sides read.
`"4b:dp2tp2 policy.backend=fsdp"` trains by FSDP2, and has dagrl's side alone. Each side runs to its end in each turn, from
the same checkpoint of random weights, in bfloat16 with float32 master weights; the first steps do not count. dagrl's step is
a whole step of a run. The plain loop's processes (`dagrl.bench.train_plain`) have their batch on the device before the first
step, and compute with dagrl's layers and loss. Losses are compared, by relative norm, with those of dagrl in the first case
of the model. `--tiny` also runs without GPUs, to try the benchmark.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dagrl import ParallelLayout
from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Take, Turn, execute, medians, process_environment, train_run
from dagrl.bench.models import SHAPES, ModelShape, write_with_tokenizer
from dagrl.bench.report import Row
from dagrl.cli.numbers import count
from dagrl.errors import ConfigError
from dagrl.machine import gpus
from dagrl.runtime.store import reserve_port
from dagrl.workers.megatron.architecture import read_architecture, step_tflop
from dagrl.workers.train.throughput import peak_tflops

MODELS = {"0.6b": "qwen3-0.6b", "1.7b": "qwen3-1.7b", "4b": "qwen3-4b", "8b": "qwen3-8b", "30b": "qwen3-30b-a3b"}
SIDES = ("dagrl", "plain Megatron")
SETTLING = 2
"""First steps of a run, which choose kernels and allocate memory."""

_CASE = re.compile(r"(?P<model>[0-9.]+b)(@(?P<layers>\d+))?:(?P<layout>((dp|tp|pp|cp|ep)\d+)+)")
_AXES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model", "dp": "data"}
COLUMNS = (
    Column("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    Column("MFU", "mfu", "{:.1%}"),
    Column("peak GiB", "peak_memory_gib"),
    Column("no phase runs, ms", "overhead_ms", "{:.2f}"),
    Column("loss error", "loss_error", "{:.1e}"),
)


@dataclass(frozen=True)
class TrainCase:
    """A model in a layout, with overrides of the configuration."""

    name: str
    model: str
    shape: ModelShape
    layout: ParallelLayout
    overrides: tuple[str, ...]

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 trains."""
        return "policy.backend=fsdp" in self.overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser, rounds=2)
    parser.add_argument("--cases", nargs="+", default=["0.6b:dp1"], metavar="CASE", help="'MODEL:LAYOUT [a.b=c ...]' each")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="default: both")
    parser.add_argument("--rows", type=count, default=16, help="sequences per step, over all workers")
    parser.add_argument("--length", type=count, default=2048, help="tokens per sequence")
    parser.add_argument("--micro", type=count, default=2, help="sequences per microbatch")
    parser.add_argument("--steps", type=count, default=6, help="counted steps of a turn")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers and a small vocabulary, in float32")


def run(options: argparse.Namespace) -> None:
    cases = [parse_case(text, options.tiny) for text in options.cases]
    with tempfile.TemporaryDirectory() as directory:
        contests = [
            Contest(case.name, {case.name: sizes_of(case, options)}, partial(sides, case, options, Path(directory)))
            for case in cases
        ]
        harness.run(options, contests, COLUMNS, finish)


def parse_case(text: str, tiny: bool) -> TrainCase:
    """Parses a case. Raises ConfigError if it is malformed or names an unknown model."""
    name, *overrides = shlex.split(text) or [""]
    match = _CASE.fullmatch(name)
    if match is None or match["model"] not in MODELS:
        raise ConfigError(f"case {text!r}: expected MODEL:LAYOUT, such as 0.6b:tp2pp2; models: {', '.join(MODELS)}")
    shape = SHAPES[MODELS[match["model"]]]
    shape = shape.narrowed() if tiny else shape
    shape = shape.with_layers(int(match["layers"])) if match["layers"] else shape
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]{2})(\d+)", match["layout"])}
    layout = ParallelLayout(**sizes, etp=1) if "ep" in sizes else ParallelLayout(**sizes)
    return TrainCase(text, name.partition(":")[0], shape, layout, tuple(overrides))


def sizes_of(case: TrainCase, options: argparse.Namespace) -> Row:
    """Returns what a case's rows have of its sizes."""
    lengths = np.full(options.rows, options.length)
    tflop = float(step_tflop(read_architecture(case.shape.config), lengths))
    return {"model": case.model, "gpus": case.layout.world_size, "tokens": int(lengths.sum()), "tflop": tflop}


def sft_config(
    model: Path, rows: int, length: int, micro: int, precision: str, layout: ParallelLayout | None = None, fsdp: bool = False
) -> dict[str, Any]:
    """Returns the configuration of an SFT run on one batch, which is the whole data."""
    layout = layout or ParallelLayout()
    sizes = {f"{word}_parallel_size": getattr(layout, axis) for axis, word in _AXES.items()}
    if fsdp:
        sizes = {key.replace("_model", ""): size for key, size in sizes.items() if size > 1 or key[0] == "d"}
    else:
        sizes |= {"sequence_parallel": layout.tp > 1} | ({"expert_tensor_parallel_size": 1} if layout.ep > 1 else {})
    policy = {
        "model_name": str(model),
        "precision": precision,
        "train_global_batch_size": rows,
        "train_micro_batch_size": min(micro, rows // layout.dp),
        "max_total_sequence_length": length,
        "sequence_packing": {"enabled": False},
        "optimizer": {"lr": 1e-5},
        "fsdp_cfg" if fsdp else "megatron_cfg": sizes,
    }
    data = {"task": "dagrl.bench.workloads:rows", "task_args": {"count": rows, "length": length}}
    sft = {"max_num_epochs": 1_000_000, "val_period": 0}
    return {"name": "bench", "algorithm": "sft", "policy": policy, "data": data, "sft": sft, "logger": {"log_level": "INFO"}}


@contextmanager
def sides(case: TrainCase, options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Take]]:
    """Writes the checkpoint and the configuration, and yields the turns of both sides."""
    precision = "float32" if options.tiny else "bfloat16"
    shape = replace(case.shape, config={**case.shape.config, "max_position_embeddings": max(40960, options.length)})
    model = write_with_tokenizer(shape, directory, precision)
    config = directory / "sft.yaml"
    sizes = options.rows, options.length, options.micro, precision, case.layout, case.fsdp
    config.write_text(yaml.safe_dump(sft_config(model, *sizes)))
    command = [sys.executable, "-m", "dagrl.cli.main", "config", str(config), *case.overrides]
    resolved = subprocess.run(command, check=True, capture_output=True, text=True, env=process_environment())  # noqa: S603
    config.write_text(resolved.stdout)  # with what a run derives from the machine, for the plain loop, too
    turns = {"dagrl": dagrl_turn, "plain Megatron": plain_turn}
    yield {side: partial(turns[side], case, options, config) for side in options.sides if side == "dagrl" or not case.fsdp}


def dagrl_turn(case: TrainCase, options: argparse.Namespace, config: Path) -> dict[str, Turn]:
    """Runs `dagrl train`. The last step, which validates, does not count."""
    lines = train_run(config, [f"sft.max_num_steps={SETTLING + options.steps + 1}"])
    facts = medians(lines[SETTLING:-1], ("perf/step_overhead_s", "perf/peak_memory_gib"))
    facts = {"overhead_ms": 1e3 * facts["perf/step_overhead_s"], "losses": [line["loss"] for line in lines]} | (
        {"peak_memory_gib": facts["perf/peak_memory_gib"]} if "perf/peak_memory_gib" in facts else {}
    )
    return {case.name: Turn([line["timing_s/total"] for line in lines[SETTLING:-1]], facts)}


def plain_turn(case: TrainCase, options: argparse.Namespace, config: Path) -> dict[str, Turn]:
    """Runs a process for each rank; a step is as long as the slowest rank's."""
    order: Row = {"config": str(config), "address": f"127.0.0.1:{reserve_port()}"}
    order |= {"layout": vars(case.layout), "steps": SETTLING + options.steps}
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}

    def rank(number: int) -> Mapping[str, Any]:
        mine = variables | {"LOCAL_RANK": str(number)}
        answer: Mapping[str, Any] = execute("dagrl.bench.train_plain", order | {"rank": number}, variables=mine)
        return answer

    with ThreadPoolExecutor(case.layout.world_size) as pool:
        answers = list(pool.map(rank, range(case.layout.world_size)))
    seconds = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
    peak = max(answer["peak_bytes"] for answer in answers) / (1 << 30)
    return {case.name: Turn(seconds[SETTLING:], {"peak_memory_gib": peak, "losses": answers[-1]["losses"]})}


def finish(rows: list[Row]) -> list[Row]:
    """Adds throughput, MFU and the error of the losses."""
    cards = gpus()
    peak = peak_tflops(cards[0].name, "bfloat16") if cards else None
    truths: dict[str, Sequence[float]] = {}
    found = []
    for row in rows:
        truth = truths.setdefault(row["model"], row["losses"])
        steps = min(len(truth), len(row["losses"]))
        expected = np.array(truth[:steps])
        error = float(np.linalg.norm(np.array(row["losses"][:steps]) - expected) / np.linalg.norm(expected))
        more = {"tokens_per_s_per_gpu": row["tokens"] / row["median_s"] / row["gpus"], "loss_error": float(f"{error:.2e}")}
        if peak is not None:
            more["mfu"] = row["tflop"] / row["median_s"] / row["gpus"] / peak
        found.append(row | more)
    return found
