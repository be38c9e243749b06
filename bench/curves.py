"""Draws learning curves of the quickstart's GRPO: reward by step and by minute, synchronous and asynchronous.

    dagrl bench curves --json F --plot F [--steps N] [--seeds N] [--variants W; W] [--config YAML] [a.b=c ...]

One session runs SFT once, then every variant with every seed, each from the same weights. The seed sets the order of prompts
and the sampling of tokens. Importance sampling correction is on in all variants; the synchronous one has nothing to correct.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.bench.deadline import BenchDeadline, add_deadline
from dagrl.bench.report import print_rows, report_while_measuring
from dagrl.bench.step import VARIANTS, Variant, add_run_arguments, begin_again, chosen

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.rl.rewards import RewardRunner
    from dagrl.run.session import Session

CONFIG = Path(__file__).parents[1] / "examples" / "grpo_quickstart.yaml"
CHOICE = VARIANTS
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
    """One run: mean reward per step, seconds from the run's start to the end of each step, mean age of its tokens."""

    variant: str
    seed: int
    reward: list[float]
    seconds: list[float]
    policy_age_mean: float
    validation_reward: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench curves`."""
    add_run_arguments(parser, CONFIG)
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps per run")
    parser.add_argument("--seeds", type=int, default=3, help="runs per variant")
    names = "; ".join(variant.name for variant in CHOICE)
    parser.add_argument("--variants", default=DEFAULT, help=f"separated by semicolons, any of: {names}; default: {DEFAULT}")
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    """Measures, and writes the results after each run."""
    from dagrl.config.file import load_config

    logging.getLogger("dagrl").setLevel("ERROR")  # its warnings concern settings measured on purpose
    variants = chosen(options.variants, CHOICE)
    deadline = BenchDeadline(options.deadline)
    with tempfile.TemporaryDirectory() as directory:
        given = [*OVERRIDES, f"grpo.max_num_steps={options.steps}", f"output_dir={directory}", *options.overrides]
        config = load_config(options.config, given)
        measured = measure(config, variants, options.seeds, Path(directory) / "first_weights", deadline)
        report_while_measuring(options, deadline, accumulate(([curve] for curve in measured), add), print_table, plot)


def measure(
    config: Config, variants: Sequence[Variant], seeds: int, first_weights: Path, deadline: BenchDeadline
) -> Iterator[Curve]:
    """Yields every variant's curve of the first seed, then of the next, as the deadline allows."""
    from dagrl.rl.rewards import RewardRunner
    from dagrl.run.loops.sft import train_sft
    from dagrl.run.plans import grpo_plans
    from dagrl.run.start import open_session

    with open_session(config, grpo_plans) as session, RewardRunner(config.reward) as reward:
        if config.sft.max_num_steps:
            train_sft(session)
        session.train.call("snapshot_reference")
        session.train.call("save_checkpoint", str(first_weights), {})
        turns = product(range(seeds), variants)
        for seed, variant in deadline.each(turns, lambda turn: f"{turn[1].name} (seed {turn[0]})"):
            yield run_variant(config, session, reward, variant, seed, first_weights)


def run_variant(
    config: Config, session: Session, reward: RewardRunner, variant: Variant, seed: int, first_weights: Path
) -> Curve:
    """Runs one variant from the first weights."""
    import time
    from dataclasses import replace

    from dagrl.run.loops.async_grpo import train_async
    from dagrl.run.loops.grpo import train_grpo
    from dagrl.telemetry.record import read_metrics

    session = begin_again(session, config, variant, first_weights, config.grpo.max_num_steps)
    data = config.data.model_copy(update={"seed": seed})
    session = replace(session, config=session.config.model_copy(update={"seed": seed, "data": data}))
    before, started = len(read_metrics(session.recorder.paths.metrics)), time.time()
    (train_async if variant.enabled else train_grpo)(session, reward)
    session.checkpoints.parts.clear()
    lines: list[dict[str, Any]] = [
        dict(line) for line in read_metrics(session.recorder.paths.metrics)[before:] if "reward/mean" in line
    ]
    return Curve(
        variant=variant.name,
        seed=seed,
        reward=[float(line["reward/mean"]) for line in lines],
        seconds=[round(float(line["time"]) - started, 3) for line in lines],
        policy_age_mean=sum(float(line["staleness/policy_age_mean"]) for line in lines) / len(lines),
        validation_reward=float(lines[-1]["validation/reward"]),
    )


def summary(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Returns a row per variant: reward of the last quarter of steps (mean, lowest and highest over seeds), held out, time.

    Uses only seeds that all variants have, as the deadline may pass between two variants of a seed.
    """
    rows = []
    variants = dict.fromkeys(curve.variant for curve in curves)
    seeds = (
        set.intersection(*({curve.seed for curve in curves if curve.variant == variant} for variant in variants))
        if variants
        else set()
    )
    for variant in variants if seeds else ():
        mine = [curve for curve in curves if curve.variant == variant and curve.seed in seeds]
        last = [_mean(curve.reward[-max(1, len(curve.reward) // 4) :]) for curve in mine]
        rows.append(
            {
                "variant": variant,
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
    """Prints a line per variant."""
    rows = (
        (row["variant"], row["seeds"], f"{row['reward']:.3f}", f"{row['lowest']:.3f} to {row['highest']:.3f}",
         f"{row['held_out']:.3f}", f"{row['seconds']:.0f}", f"{row['age']:.2f}")
        for row in summary(curves)
    )  # fmt: skip
    print_rows(("variant", "seeds", "reward, last quarter", "over seeds", "held out", "seconds", "age"), rows)


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Plots reward by step (mean and range over seeds) and by minute (every run)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for variant, color in zip(dict.fromkeys(curve.variant for curve in curves), COLORS, strict=False):
        mine = [curve for curve in curves if curve.variant == variant]
        columns = list(zip(*(curve.reward for curve in mine), strict=True))
        steps = range(1, len(columns) + 1)
        by_step.plot(steps, [_mean(column) for column in columns], color=color, label=variant)
        by_step.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15, linewidth=0
        )
        for curve in mine:
            by_time.plot([second / 60 for second in curve.seconds], curve.reward, color=color, alpha=0.8, linewidth=1)
    by_step.set(title="mean and range over seeds", xlabel="step", ylabel="reward of the step's samples")
    by_time.set(title="every run", xlabel="minutes")
    by_step.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
