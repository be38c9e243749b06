"""Compares GRPO steps of dagrl with the same step in plain Ray calls: time by phase, idle shares, tokens/s, MFU.

    dagrl bench compare --config bench/gpu/step.yaml --json F --plot F [--rounds N] [--variants "plain Ray; sync"] [a.b=c]

All variants run in one session, with the same workers, model, prompts, seeds and lengths. They take turns; each number is
the median over the steps of all rounds. Compare variants by trained tokens per second.
The learning rate is zero: an optimizer step does all its work but leaves the weights unchanged. Every step of every variant
therefore starts from the same weights, with no checkpoint to reload. The JSON file is rewritten after each variant, so an
interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from dagrl.bench.deadline import BenchDeadline, add_deadline
from dagrl.bench.report import report_while_measuring
from dagrl.bench.step import (
    CONFIG,
    FIFO,
    PLAIN,
    VARIANTS,
    WAITING,
    Measured,
    Metrics,
    Variant,
    add_run_arguments,
    chosen,
    longest_pause_s,
    measure,
    run_config,
)
from dagrl.telemetry.metrics import IDLE, TIMING, TRAIN_MFU, TRAIN_SECONDS, UPDATE

if TYPE_CHECKING:
    from dagrl.config import Config

CHOICE = (PLAIN, FIFO, *(variant for variant in VARIANTS if variant.age <= 2 and variant not in WAITING))
"""Default variants. `sync, fifo` starts requests in the order of plain calls, so it differs from `sync` in the order alone.

Both, like plain calls, train on a batch once it is complete; `sync, overlapped` starts earlier if the configuration allows.
"""

PHASES = ("generate", "reward", "logprobs", "reference_logprobs", "accumulate_gradients", "train_step", "refit")


@dataclass(frozen=True)
class CompareRow:
    """Medians over steps in seconds; `phases_s` is the driver's wait per phase (in another thread, if the loop has one).

    `update_s` runs from the end of training until generation has the weights (0 for plain calls, which only refit).
    `update_pause_s` is the longest pause of generation over all steps. `tokens_per_s_per_gpu` counts trained prompt and
    completion tokens over the GPUs (or workers) of both roles; low and high are the slowest and the fastest round. MFU
    covers the train GPUs, in the optimizer step and over the whole step (counting the FLOPs of one optimizer step); 0 if
    the device's peak is unknown. `times_plain` is the rate over that of plain calls, None if those were not measured.
    """

    variant: str
    rounds: int
    steps: int
    step_s: float
    phases_s: dict[str, float]
    exposed_generation_s: float
    idle_train: float
    idle_generation: float
    update_s: float
    update_pause_s: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_gpu_low: float
    tokens_per_s_per_gpu_high: float
    mfu_train_step: float
    mfu: float
    policy_age_mean: float
    gen_kl_error: float
    times_plain: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench compare`."""
    add_run_arguments(parser, CONFIG)
    parser.add_argument("--steps", type=int, help="steps of each variant and round that count, rounded up to whole bursts")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant")
    parser.add_argument(
        "--variants",
        default="; ".join(variant.name for variant in CHOICE),
        help="separated by semicolons; default: %(default)s",
    )
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested files."""
    variants = chosen(options.variants)
    deadline = BenchDeadline(options.deadline)
    with run_config(options) as given:
        config = at_rest(given)
        measured = measure(config, variants, None, options.rounds, deadline)
        report_while_measuring(options, deadline, (as_rows(config, found) for found in measured), print_table, plot)


def at_rest(config: Config) -> Config:
    """Returns the configuration with a learning rate of zero, which the configuration's validation rejects for a run."""
    megatron = config.policy.megatron_cfg
    optimizer = megatron.optimizer.model_copy(update={"lr": 0.0, "min_lr": 0.0})
    scheduler = megatron.scheduler.model_copy(update={"lr_warmup_init": 0.0})
    megatron = megatron.model_copy(update={"optimizer": optimizer, "scheduler": scheduler})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"megatron_cfg": megatron})})


def as_rows(config: Config, measured: Measured) -> list[CompareRow]:
    """Returns a row per measured variant."""
    results = [as_row(config, variant, parts) for variant, parts in measured.items()]
    rates = [row.tokens_per_s_per_gpu for row in results if row.variant == PLAIN.name]
    return [replace(row, times_plain=row.tokens_per_s_per_gpu / rates[0]) for row in results] if rates else results


def as_row(config: Config, variant: Variant, rounds: Sequence[Sequence[Metrics]]) -> CompareRow:
    """Returns one row, without `times_plain`."""
    from dagrl.config.settings import device_count

    steps, devices = [step for part in rounds for step in part], device_count(config)

    def middle(name: str) -> float:
        return median(float(step.get(name) or 0.0) for step in steps)

    rates = sorted(_total(part, "trained_tokens") / _total(part, TIMING + "total") / devices for part in rounds)
    rate = _total(steps, "trained_tokens") / _total(steps, TIMING + "total") / devices
    return CompareRow(
        variant=variant.name,
        rounds=len(rounds),
        steps=len(rounds[0]),
        step_s=middle(TIMING + "total"),
        phases_s={phase: middle(TIMING + phase) for phase in PHASES},
        exposed_generation_s=middle(TIMING + "exposed_generation"),
        idle_train=middle(IDLE + "train"),
        idle_generation=middle(IDLE + "generation"),
        update_s=middle(UPDATE),
        update_pause_s=longest_pause_s(steps),
        tokens_per_s_per_gpu=rate,
        tokens_per_s_per_gpu_low=rates[0],
        tokens_per_s_per_gpu_high=rates[-1],
        mfu_train_step=middle(TRAIN_MFU),
        mfu=median(_share_trained(step) * float(step.get(TRAIN_MFU) or 0.0) for step in steps),
        policy_age_mean=middle("staleness/policy_age_mean"),
        gen_kl_error=middle("gen_kl_error"),
        times_plain=None,
    )


def _share_trained(step: Metrics) -> float:
    return float(step.get(TRAIN_SECONDS) or 0.0) / float(step[TIMING + "total"])


def _total(steps: Sequence[Metrics], name: str) -> float:
    return sum(float(step[name]) for step in steps)


def print_table(results: Sequence[CompareRow]) -> None:
    """Prints the rows."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="seconds per step, by phase; x: speedup over plain Ray", title_justify="left")
    columns = ("exposed", "idle train", "idle gen", "update ms", "pause ms", "tok/s/GPU", "MFU train", "MFU", "KL", "x")
    for name in ("variant", "step", *PHASES, *columns):
        table.add_column(name.replace("_", " "), justify="left" if name == "variant" else "right", no_wrap=name == "variant")
    for row in results:
        phases = [f"{row.phases_s[phase]:.3f}" for phase in PHASES]
        table.add_row(
            row.variant, f"{row.step_s:.2f}", *phases, f"{row.exposed_generation_s:.2f}", f"{row.idle_train:.0%}",
            f"{row.idle_generation:.0%}", f"{row.update_s * 1000:.0f}", f"{row.update_pause_s * 1000:.0f}",
            f"{row.tokens_per_s_per_gpu:,.0f}",
            *(f"{mfu:.1%}" if mfu else "" for mfu in (row.mfu_train_step, row.mfu)),
            f"{row.gen_kl_error:.1e}", _times(row.times_plain).rstrip("x"),
        )  # fmt: skip
    Console(width=160).print(table)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def plot(results: Sequence[CompareRow], path: Path) -> None:
    """Plots tokens per second and GPU, with the slowest and fastest round, and idle shares, by variant."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (speed, idle) = pyplot.subplots(1, 2, figsize=(11, 0.6 * len(results) + 1.8), layout="constrained")
    places = list(range(len(results)))
    rates = [row.tokens_per_s_per_gpu for row in results]
    spread = [[row.tokens_per_s_per_gpu - row.tokens_per_s_per_gpu_low for row in results]]
    spread.append([row.tokens_per_s_per_gpu_high - row.tokens_per_s_per_gpu for row in results])
    bars = speed.barh(places, rates, xerr=spread, color="#4477aa")
    speed.bar_label(bars, [_times(row.times_plain) for row in results], padding=4)
    speed.set(title="trained tokens/s/GPU", yticks=places, yticklabels=[row.variant for row in results])
    speed.margins(x=0.15)
    idle.barh([place - 0.2 for place in places], [row.idle_train for row in results], 0.4, label="train", color="#ee6677")
    idle.barh(
        [place + 0.2 for place in places], [row.idle_generation for row in results], 0.4, label="generation", color="#228833"
    )
    idle.set(title="idle share of the step", yticks=places, yticklabels=[], xlim=(0, 1))
    idle.legend()
    for axes in (speed, idle):
        axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
