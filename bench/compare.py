"""Whole GRPO steps of dagrl beside the same step written in plain Ray calls: time by phase, idle shares, tokens/s, MFU.

    dagrl bench compare --config bench/gpu/step.yaml --json F --plot F [--rounds N] [--ways "plain Ray; sync"] [a.b=c ...]

One session serves all ways (`bench.step`), so that workers, model, prompts, seeds and lengths are the same; they are
measured in turn, and numbers are medians over the steps of all rounds. What is faster is told by trained tokens a second.
The learning rate is zero: an optimizer step does all its work and changes nothing, so that every step of every way has the
same weights, without checkpoints of many gigabytes. The JSON file is written after each way, so that a stop loses nothing.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.deadline import Deadline, add_deadline, hurried
from bench.report import write_rows
from bench.step import CONFIG, FIFO, PLAIN, WAITING, WAYS, Measured, Metrics, Way, chosen, longest_pause_s, measure
from dagrl.telemetry.metrics import IDLE, TIMING, TRAIN_MFU, TRAIN_SECONDS, UPDATE

if TYPE_CHECKING:
    from dagrl.config import Config

CHOICE = (PLAIN, FIFO, *(way for way in WAYS if way.age <= 2 and way not in WAITING))
"""`sync, fifo` starts requests in the order that plain calls do: what is between it and `sync` is the order alone.

Both, as plain calls, train on a batch when it is whole; `sync, overlapped`, in a setting that has it on, begins before.
"""

PHASES = ("generate", "reward", "logprobs", "reference_logprobs", "accumulate_gradients", "train_step", "refit")


@dataclass(frozen=True)
class Result:
    """Medians over steps in seconds, by phase what the driver waited for it (in another thread, where the loop has one).

    `update_s` counts from the end of training until generation has the weights (0 of plain calls, which have a refit alone),
    `update_pause_s` is the longest time of all steps that generation stood still for it.
    `tokens_per_s_per_gpu` counts prompts and completions that were trained on, by the GPUs (or workers) of both roles; low
    and high are the slowest and the fastest round's. MFU is of the train GPUs, in their optimizer step and over the whole
    step (with its one optimizer step's FLOPs); 0 where what the device can do is not known. `times_plain` is the rate over
    that of plain calls, None where those were not measured.
    """

    way: str
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
    """The options of `dagrl bench compare`."""
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys to set over those of the configuration")
    parser.add_argument("--config", type=Path, default=CONFIG, help="another setting, for other machines and models")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the rows to this file (png, svg)")
    parser.add_argument("--steps", type=int, help="steps of each way and round that count, rounded up to whole bursts")
    parser.add_argument("--rounds", type=int, default=2, help="times that all ways are measured in turn")
    parser.add_argument(
        "--ways", default="; ".join(way.name for way in CHOICE), help="separated by semicolons; default: %(default)s"
    )
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    from dagrl.config.file import load_config

    logging.getLogger("dagrl").setLevel("ERROR")  # the warnings are about settings that are measured on purpose
    ways = chosen(options.ways)
    deadline = Deadline(options.deadline)
    with tempfile.TemporaryDirectory() as directory:
        steps = [f"grpo.max_num_steps={options.steps}"] if options.steps else []
        config = load_config(options.config, [*options.overrides, *steps, f"output_dir={directory}"])
        config = at_rest(hurried(config, options.deadline))
        results: list[Result] = []
        for measured in measure(config, ways, None, options.rounds, deadline):
            results = as_results(config, measured)
            write_rows(options.json, results, deadline.left_out)
        write_rows(options.json, results, deadline.left_out)
    print_table(results)
    deadline.tell()
    if options.plot and results:
        plot(results, options.plot)


def at_rest(config: Config) -> Config:
    """The configuration with a learning rate of zero, which one of a run may not have."""
    megatron = config.policy.megatron_cfg
    optimizer = megatron.optimizer.model_copy(update={"lr": 0.0, "min_lr": 0.0})
    scheduler = megatron.scheduler.model_copy(update={"lr_warmup_init": 0.0})
    megatron = megatron.model_copy(update={"optimizer": optimizer, "scheduler": scheduler})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"megatron_cfg": megatron})})


def as_results(config: Config, measured: Measured) -> list[Result]:
    """A row for each way that has been measured."""
    results = [as_result(config, way, parts) for way, parts in measured.items()]
    rates = [row.tokens_per_s_per_gpu for row in results if row.way == PLAIN.name]
    return [replace(row, times_plain=row.tokens_per_s_per_gpu / rates[0]) for row in results] if rates else results


def as_result(config: Config, way: Way, rounds: Sequence[Sequence[Metrics]]) -> Result:
    """One row, compared with nothing yet."""
    from dagrl.loops.session import devices_of

    steps, devices = [step for part in rounds for step in part], devices_of(config)

    def middle(name: str) -> float:
        return median(float(step.get(name) or 0.0) for step in steps)

    rates = sorted(_total(part, "trained_tokens") / _total(part, TIMING + "total") / devices for part in rounds)
    rate = _total(steps, "trained_tokens") / _total(steps, TIMING + "total") / devices
    return Result(
        way=way.name,
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


def print_table(results: Sequence[Result]) -> None:
    """The rows, for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="seconds a step, by phase; x: of plain Ray", title_justify="left")
    beside = ("exposed", "idle train", "idle gen", "update ms", "pause ms", "tok/s/GPU", "MFU train", "MFU", "KL", "x")
    for name in ("way", "step", *PHASES, *beside):
        table.add_column(name.replace("_", " "), justify="left" if name == "way" else "right", no_wrap=name == "way")
    for row in results:
        phases = [f"{row.phases_s[phase]:.3f}" for phase in PHASES]
        table.add_row(
            row.way, f"{row.step_s:.2f}", *phases, f"{row.exposed_generation_s:.2f}", f"{row.idle_train:.0%}",
            f"{row.idle_generation:.0%}", f"{row.update_s * 1000:.0f}", f"{row.update_pause_s * 1000:.0f}",
            f"{row.tokens_per_s_per_gpu:,.0f}",
            *(f"{mfu:.1%}" if mfu else "" for mfu in (row.mfu_train_step, row.mfu)),
            f"{row.gen_kl_error:.1e}", _times(row.times_plain).rstrip("x"),
        )  # fmt: skip
    Console(width=160).print(table)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def plot(results: Sequence[Result], path: Path) -> None:
    """Tokens a second and GPU with the slowest and fastest round, and idle shares, by way."""
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
    speed.set(title="trained tokens a second and GPU", yticks=places, yticklabels=[row.way for row in results])
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
