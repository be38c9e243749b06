"""Measures whole steps of `dagrl train`: one configuration with other keys on each side, each run to its end, in turn.

    dagrl bench step                                        workers that sleep; loops, scheduler and refit are real
    dagrl bench step [a.b=c ...] --config my_run.yaml --steps 8
    dagrl bench step --sides "bf16:" "fp8: policy.generation.vllm_cfg.precision=fp8"
    dagrl bench step --sides sync eager "in flight, age 2"  sides that are known by name

Times and other numbers are those of `metrics.jsonl`. Every turn is a run of its own, from the same weights and seed. At a
maximal age A (`grpo.async_grpo.max_trajectory_age_steps`), the first A + 1 steps build up the lead and the last A + 1 use it
up; they do not count, nor do the first two of any run. `trained tokens/s` is over all counted steps of a turn.
Sequence lengths should be forced (`policy.generation.forced_lengths`), so that equal seeds give equal work for any weights.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Turn, medians, train_run
from dagrl.bench.report import Row
from dagrl.cli.numbers import count
from dagrl.errors import ConfigError, RunError

CONFIG = Path(__file__).with_name("step_simulated.yaml")
SETTLING = 2
_ASYNC = (
    "grpo.async_grpo.enabled=true grpo.async_grpo.in_flight_weight_updates={} grpo.async_grpo.max_trajectory_age_steps={}"
)
KNOWN: Mapping[str, str] = {
    "sync": "grpo.async_grpo.enabled=false",
    "eager": "grpo.async_grpo.enabled=false executor=eager",
    "Ray's engine": "grpo.async_grpo.enabled=false executor_cfg.engine=ray",
    "async, age 1": _ASYNC.format("false", 1),
    **{f"in flight, age {age}": _ASYNC.format("true", age) for age in (1, 2, 4, 8)},
}
"""Overrides by the name of a side."""

DEFAULT = ("sync", "eager", "async, age 1", "in flight, age 1", "in flight, age 2")
FACTS = (
    "timing_s/generate", "timing_s/logprobs", "timing_s/reference_logprobs", "timing_s/train_step",
    "timing_s/demonstration_step", "timing_s/refit", "timing_s/exchange", "timing_s/exposed_generation",
    "timing_s/update", "timing_s/update_pause", "idle/train", "idle/generation", "perf/step_overhead_s",
    "perf/quantum_overhead", "perf/train_fp_utilization", "perf/peak_memory_gib", "staleness/policy_age_mean",
    "gen_kl_error", "reward/mean", "loss",
)  # fmt: skip
"""Metrics of which rows have the medians."""

COLUMNS = (
    Column("trained tokens/s", "trained_tokens_per_s", "{:,.0f}"),
    Column("generate s", "timing_s/generate", "{:.3f}"),
    Column("train s", "timing_s/train_step", "{:.3f}"),
    Column("refit s", "timing_s/refit", "{:.4f}"),
    Column("no phase runs, s", "perf/step_overhead_s", "{:.4f}"),
    Column("idle train", "idle/train", "{:.0%}"),
    Column("idle generation", "idle/generation", "{:.0%}"),
    Column("age", "staleness/policy_age_mean", "{:.2f}"),
    Column("MFU", "perf/train_fp_utilization", "{:.1%}"),
    Column("KL", "gen_kl_error", "{:.1e}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser, rounds=2)
    parser.add_argument("--config", type=Path, default=CONFIG, help="configuration of all sides (default: %(default)s)")
    parser.add_argument("--steps", type=count, default=6, help="counted steps of a run (default: %(default)s)")
    known = f"'NAME: a.b=c ...' each, or one of: {'; '.join(KNOWN)}"
    parser.add_argument("--sides", nargs="+", default=DEFAULT, metavar="SIDE", help=known)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys that override the file's, on all sides")


def run(options: argparse.Namespace) -> None:
    sides = {side.partition(":")[0].strip(): overrides_of(side) for side in options.sides}
    name = options.config.stem
    takes = {side: partial(turn, name, options, words) for side, words in sides.items()}
    harness.run(options, [Contest(name, {name: {}}, lambda: nullcontext(takes))], COLUMNS)


def overrides_of(side: str) -> list[str]:
    """Returns the overrides of a side. Raises ConfigError for a name without a colon that is not known."""
    name, colon, words = side.partition(":")
    if not colon and name not in KNOWN:
        raise ConfigError(f"--sides: found {name!r}; expected 'NAME: a.b=c ...' or one of {'; '.join(KNOWN)}")
    return words.split() if colon else KNOWN[name].split()


def turn(name: str, options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Turn]:
    """Runs the configuration once and returns its counted steps."""
    words = [*options.overrides, *overrides]
    age = int(
        next((found[1] for word in reversed(words) if (found := re.search(r"max_trajectory_age_steps=(\d+)", word))), 0)
    )
    first, last = max(SETTLING, age + 1), age + 1
    steps = first + options.steps + last
    stage = "sft" if yaml.safe_load(options.config.read_text()).get("algorithm") == "sft" else "grpo"
    lines = train_run(options.config, [*words, f"{stage}.max_num_steps={steps}"])
    return {name: counted(lines[first : first + options.steps])}


def counted(lines: Sequence[Mapping[str, Any]]) -> Turn:
    """Returns the turn of these lines of `metrics.jsonl`. Raises RunError if there are none."""
    if not lines:
        raise RunError("the run had too few steps; is there another limit than --steps, such as max_num_epochs?")
    seconds = [float(line["timing_s/total"]) for line in lines]
    facts: Row = medians(lines, FACTS)
    tokens = sum(float(line.get("trained_tokens") or line.get("valid_tokens") or 0) for line in lines)
    return Turn(seconds, {**facts, "trained_tokens_per_s": tokens / sum(seconds)})
