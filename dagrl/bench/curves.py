"""Draws learning curves of the quickstart's GRPO: reward by step and by minute, synchronous and asynchronous.

    dagrl bench curves --json F --plot F [--steps N] [--seeds N] [--variants W; W] [--config YAML] [a.b=c ...]

One session runs SFT once, then every variant with every seed, each from the same weights. The seed sets the order of prompts
and the sampling of tokens. Importance sampling correction is on in all variants; the synchronous one has nothing to correct.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product
from operator import add
from pathlib import Path
from statistics import mean

import numpy as np

from dagrl.bench.deadline import BenchDeadline, add_deadline
from dagrl.bench.report import Row, count, drawing, print_rows, report_rows
from dagrl.bench.step import VARIANTS, Variant, add_run_arguments, begin_again, chosen, run_config, run_loop
from dagrl.config import Config
from dagrl.rl.rewards import RewardRunner
from dagrl.run.loops.sft import train_sft
from dagrl.run.plans import grpo_plans
from dagrl.run.session import Session
from dagrl.run.start import open_session

CONFIG = Path(__file__).parents[1] / "examples" / "grpo_quickstart.yaml"
DEFAULT = "sync; in flight, age 1; in flight, age 4"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, CONFIG)
    parser.add_argument("--steps", type=count, default=40, help="GRPO steps per run")
    parser.add_argument("--seeds", type=count, default=3, help="runs per variant")
    names = "; ".join(variant.name for variant in VARIANTS)
    parser.add_argument("--variants", default=DEFAULT, help=f"separated by semicolons, any of: {names}; default: {DEFAULT}")
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    variants = chosen(options.variants, VARIANTS)
    deadline = BenchDeadline(options.deadline)
    with run_config(options, OVERRIDES) as config:
        curves = measure(config, variants, options.seeds, Path(config.output_dir) / "first_weights", deadline)
        report_rows(options, accumulate(([curve] for curve in curves), add), print_table, plot, deadline=deadline)


def measure(
    config: Config, variants: Sequence[Variant], seeds: int, first_weights: Path, deadline: BenchDeadline
) -> Iterator[Row]:
    """Yields every variant's curve of the first seed, then of the next, as the deadline allows."""
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
) -> Row:
    """Runs one variant from the first weights. Returns its curve: the reward of each step, and seconds from the run's start
    to the step's end."""
    session = begin_again(session, config, variant, first_weights, config.grpo.max_num_steps)
    data = config.data.model_copy(update={"seed": seed})
    session = replace(session, config=session.config.model_copy(update={"seed": seed, "data": data}))
    started = time.time()
    lines = [line for line in run_loop(session, reward, variant) if "reward/mean" in line]
    return {
        "variant": variant.name,
        "seed": seed,
        "reward": [line["reward/mean"] for line in lines],
        "seconds": [round(line["time"] - started, 3) for line in lines],
        "policy_age_mean": mean(line["staleness/policy_age_mean"] for line in lines),
        "validation_reward": lines[-1]["validation/reward"],
    }


def summary(curves: Sequence[Row]) -> list[Row]:
    """Returns a row per variant: reward of the last quarter of steps (mean, lowest and highest over seeds), held out, time.

    Uses only seeds that all variants have, as the deadline may pass between two variants of a seed.
    """
    seeds: dict[str, set[int]] = {}
    for curve in curves:
        seeds.setdefault(curve["variant"], set()).add(curve["seed"])
    shared = set.intersection(*seeds.values()) if seeds else set()
    rows = []
    for variant in seeds if shared else ():
        mine = [curve for curve in curves if curve["variant"] == variant and curve["seed"] in shared]
        last = [mean(curve["reward"][-max(1, len(curve["reward"]) // 4) :]) for curve in mine]
        rows.append(
            {
                "variant": variant,
                "seeds": len(mine),
                "reward": mean(last),
                "lowest": min(last),
                "highest": max(last),
                "held_out": mean(curve["validation_reward"] for curve in mine),
                "seconds": mean(curve["seconds"][-1] for curve in mine),
                "age": mean(curve["policy_age_mean"] for curve in mine),
            }
        )
    return rows


def print_table(curves: Sequence[Row]) -> None:
    """Prints a line per variant."""
    rows = (
        (row["variant"], row["seeds"], f"{row['reward']:.3f}", f"{row['lowest']:.3f} to {row['highest']:.3f}",
         f"{row['held_out']:.3f}", f"{row['seconds']:.0f}", f"{row['age']:.2f}")
        for row in summary(curves)
    )  # fmt: skip
    print_rows(("variant", "seeds", "reward, last quarter", "over seeds", "held out", "seconds", "age"), rows)


def plot(curves: Sequence[Row], path: Path) -> None:
    """Plots reward by step (mean and range over seeds) and by minute (every run)."""
    with drawing(path, columns=2, figsize=(11, 4), sharey=True) as (_, ((by_step, by_time),)):
        for variant in dict.fromkeys(curve["variant"] for curve in curves):
            mine = [curve for curve in curves if curve["variant"] == variant]
            rewards = np.array([curve["reward"] for curve in mine])  # [seeds, steps]
            steps, ends = range(1, rewards.shape[1] + 1), (rewards.min(0), rewards.max(0))
            (line,) = by_step.plot(steps, rewards.mean(0), label=variant)
            color = line.get_color()
            by_step.fill_between(steps, *ends, color=color, alpha=0.15, linewidth=0)
            for curve in mine:
                by_time.plot(np.array(curve["seconds"]) / 60, curve["reward"], color=color, alpha=0.8, linewidth=1)
        by_step.set(title="mean and range over seeds", xlabel="step", ylabel="reward of the step's samples")
        by_time.set(title="every run", xlabel="minutes")
        by_step.legend()
