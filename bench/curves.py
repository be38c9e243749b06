"""Learning curves: reward by step and by minute of the quickstart's GRPO, synchronous and asynchronous, over several seeds.

    dagrl bench curves --json F --plot F [--steps N] [--seeds N] [--ways W; W] [--config YAML] [a.b=c ...]

One session: SFT once, then every way from the same weights with every seed, in turn. A seed decides the prompts' order and
every token drawn. The importance sampling correction is on in all ways (it has nothing to correct in the synchronous one).
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.deadline import Deadline, add_deadline
from bench.report import write_rows
from bench.step import WAYS, Way, begin_again, chosen

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.loops.session import Session
    from dagrl.rewards import RewardRunner

CONFIG = Path(__file__).parents[1] / "examples" / "grpo_quickstart.yaml"
CHOICE = WAYS
DEFAULT = "sync; in flight, age 1; in flight, age 4"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#ee7733")
OVERRIDES = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    "checkpointing.enabled=false",
    "checkpointing.export_hf=false",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "logger.tensorboard_enabled=false",
    "logger.plot_enabled=false",
    "logger.trace_enabled=false",
)


@dataclass(frozen=True)
class Curve:
    """One run: mean reward of each step's samples, seconds from its start to the end of each step, ages of its tokens."""

    way: str
    seed: int
    reward: list[float]
    seconds: list[float]
    policy_age_mean: float
    validation_reward: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench curves`."""
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys to set over those of the configuration")
    parser.add_argument("--config", type=Path, default=CONFIG, help="another run than the quickstart")
    parser.add_argument("--json", type=Path, help="write the curves to this file, run by run")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file (png, svg)")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way")
    names = "; ".join(way.name for way in CHOICE)
    parser.add_argument("--ways", default=DEFAULT, help=f"some of: {names} (separated by semicolons; default: {DEFAULT})")
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, write what was asked for after each run."""
    from dagrl.config.file import load_config

    logging.getLogger("dagrl").setLevel("ERROR")  # the warnings are about settings that are measured on purpose
    ways = chosen(options.ways, CHOICE)
    curves: list[Curve] = []
    deadline = Deadline(options.deadline)
    with tempfile.TemporaryDirectory() as directory:
        given = [*OVERRIDES, f"grpo.max_num_steps={options.steps}", f"output_dir={directory}", *options.overrides]
        config = load_config(options.config, given)
        for curve in measure(config, ways, options.seeds, Path(directory) / "first_weights", deadline):
            curves.append(curve)
            write_rows(options.json, curves, deadline.left_out)
        write_rows(options.json, curves, deadline.left_out)
    print_table(curves)
    deadline.tell()
    if options.plot and curves:
        plot(curves, options.plot)


def measure(config: Config, ways: Sequence[Way], seeds: int, first_weights: Path, deadline: Deadline) -> Iterator[Curve]:
    """Yields every way's curve of the first seed, then of the next, as far as the deadline allows."""
    from dagrl.loops.grpo_step import grpo_plans
    from dagrl.loops.sft import train_sft
    from dagrl.loops.start import open_session
    from dagrl.rewards import RewardRunner

    with open_session(config, grpo_plans(config)) as session, RewardRunner(config.reward) as reward:
        if config.sft.max_num_steps:
            train_sft(session)
        session.train.call("snapshot_reference")
        session.train.call("save_checkpoint", str(first_weights), {})
        turns = product(range(seeds), ways)
        for seed, way in deadline.each(turns, lambda turn: f"{turn[1].name} (seed {turn[0]})"):
            yield run_way(config, session, reward, way, seed, first_weights)


def run_way(config: Config, session: Session, reward: RewardRunner, way: Way, seed: int, first_weights: Path) -> Curve:
    """One run from the first weights."""
    import time

    from dagrl.loops.async_grpo import train_async
    from dagrl.loops.grpo import train_grpo
    from dagrl.telemetry.record import read_metrics

    begin_again(session, config, way, first_weights, config.grpo.max_num_steps)
    data = config.data.model_copy(update={"seed": seed})
    session.config = session.config.model_copy(update={"seed": seed, "data": data})
    before, started = len(read_metrics(session.paths.metrics)), time.time()
    (train_async if way.enabled else train_grpo)(session, reward)
    session.savers.clear()
    lines: list[dict[str, Any]] = [
        dict(line) for line in read_metrics(session.paths.metrics)[before:] if "reward/mean" in line
    ]
    return Curve(
        way=way.name,
        seed=seed,
        reward=[float(line["reward/mean"]) for line in lines],
        seconds=[round(float(line["time"]) - started, 3) for line in lines],
        policy_age_mean=sum(float(line["staleness/policy_age_mean"]) for line in lines) / len(lines),
        validation_reward=float(lines[-1]["validation/reward"]),
    )


def summary(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """By way: reward of the last quarter of the steps (mean over seeds, lowest and highest), held out, and a run's time.

    Of the seeds that all ways have: the time may be up in the middle of one.
    """
    rows = []
    ways = dict.fromkeys(curve.way for curve in curves)
    seeds = set.intersection(*({curve.seed for curve in curves if curve.way == way} for way in ways)) if ways else set()
    for way in ways if seeds else ():
        mine = [curve for curve in curves if curve.way == way and curve.seed in seeds]
        last = [_mean(curve.reward[-max(1, len(curve.reward) // 4) :]) for curve in mine]
        rows.append(
            {
                "way": way,
                "seeds": len(mine),
                "reward": _mean(last),
                "lowest": min(last),
                "highest": max(last),
                "held_out": _mean([curve.validation_reward for curve in mine]),
                "seconds": _mean([curve.seconds[-1] for curve in mine]),
                "age": _mean([curve.policy_age_mean for curve in mine]),
            }
        )
    return rows


def print_table(curves: Sequence[Curve]) -> None:
    """One line for each way."""
    from rich.console import Console
    from rich.table import Table

    table = Table("way", "seeds", "reward, last quarter", "over seeds", "held out", "seconds", "age")
    for row in summary(curves):
        spread = f"{row['lowest']:.3f} to {row['highest']:.3f}"
        cells = (f"{row['reward']:.3f}", spread, f"{row['held_out']:.3f}", f"{row['seconds']:.0f}", f"{row['age']:.2f}")
        table.add_row(row["way"], str(row["seeds"]), *cells)
    Console(width=110).print(table)


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Reward by step (mean over seeds, and their range), and reward by minute (every run)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for way, color in zip(dict.fromkeys(curve.way for curve in curves), COLORS, strict=False):
        mine = [curve for curve in curves if curve.way == way]
        columns = list(zip(*(curve.reward for curve in mine), strict=True))
        steps = range(1, len(columns) + 1)
        by_step.plot(steps, [_mean(column) for column in columns], color=color, label=way)
        by_step.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15, linewidth=0
        )
        for curve in mine:
            by_time.plot([second / 60 for second in curve.seconds], curve.reward, color=color, alpha=0.8, linewidth=1)
    by_step.set(title="mean over seeds, and their range", xlabel="step", ylabel="reward of the step's samples")
    by_time.set(title="every run", xlabel="minutes")
    by_step.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
