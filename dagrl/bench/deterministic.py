"""What `policy.deterministic` costs, and what it gives: a run without it and one with it, in turns, and a replay of each.

    dagrl bench deterministic --json F                                   the quickstart's model, on CPUs
    dagrl bench deterministic --config my_run.yaml --steps 6 --json F    on GPUs

Reports the median time of a step and its phases without the first two steps, the share of the tokens whose log-probabilities
generation and training give bit for bit equally, their mean `gen_kl_error`, and what `dagrl replay` finds to differ when the
last step is executed again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from dagrl.bench.report import add_outputs, count, report_medians
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.run.reexecute import Request, replay_step
from dagrl.run.train import train
from dagrl.telemetry.metrics import REWARD_MEAN, TIMING
from dagrl.telemetry.record import RunPaths, read_metrics
from dagrl.telemetry.rollouts import read_rollouts, rollout_files

CONFIG = Path(__file__).parents[1] / "examples" / "grpo_quickstart.yaml"
SETTLING = 2
"""First steps that are not timed."""

SHORT = ("sft.max_num_steps=60", "sft.val_period=0")
"""For the quickstart: enough that some answers are right."""

QUIET = ("grpo.val_period=0", "grpo.val_at_start=false", "checkpointing.export_hf=false")
TIMES = ("total", "generate", "logprobs", "train_step", "refit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="F", type=Path, default=CONFIG, help="default: the GRPO quickstart")
    parser.add_argument("--steps", type=count, default=12, help="GRPO steps of a run (default: 12)")
    parser.add_argument("--rounds", type=count, default=2, help="runs of each kind, in turns (default: 2)")
    add_outputs(parser, plot=False)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys that override the file's")


def run(options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            for on in found:
                overrides = [*QUIET, *(SHORT if options.config == CONFIG else ()), *options.overrides]
                own = [f"policy.deterministic={str(on == 'on').lower()}", f"output_dir={directory}", f"name={on}-{number}"]
                config = load_config(options.config, [*overrides, f"grpo.max_num_steps={options.steps}", *own])
                found[on].append(measure(config))
    report_medians(options.json, {"steps": options.steps, "rounds": options.rounds}, found)


def measure(config: Config) -> dict[str, float]:
    """Runs the configuration, and its last step once more."""
    train(config)
    directory = RunPaths.of(config).directory
    lines: list[dict[str, Any]] = [dict(line) for line in read_metrics(directory / "metrics.jsonl")]
    steady = [line for line in lines if REWARD_MEAN in line][SETTLING:]
    times = {
        f"{name}_s": median(line[TIMING + name] for line in steady)
        for name in TIMES
        if all(TIMING + name in line for line in steady)
    }
    again = replay_step(Request(directory, int(lines[-1]["step"])), train)
    return {
        **times,
        "gen_kl_error": mean(line["gen_kl_error"] for line in steady),
        "equal_logprobs": equal_share(directory),
        "values_not_reproduced": float(len(again.differences)),
    }


def equal_share(directory: Path) -> float:
    """The share of the sampled tokens whose log-probability is the same in generation and in training, bit for bit."""
    equal = tokens = 0
    for path in rollout_files(directory / "rollouts").values():
        for row in read_rollouts(path, ["logprobs", "train_logprobs", "sampled"]):
            pairs = zip(row["logprobs"], row["train_logprobs"] or (), row["sampled"], strict=True)
            made = [one == other for one, other, sampled in pairs if sampled]
            equal, tokens = equal + sum(made), tokens + len(made)
    return equal / tokens
