"""Measures whole GRPO steps: plain Ray calls, synchronous, asynchronous, in-flight updates; same seed and workers.

    dagrl bench step                                  with bench/step.yaml; takes minutes on two cores
    dagrl bench step --json F --plot F [--steps N] [--config YAML] [--variants "plain Ray; sync"] [--at-rest] [a.b=c ...]

All variants run in one session with the same workers, graphs and first weights. Sequence lengths are forced
(`policy.generation.forced_lengths`), so equal seeds give equal work for any weights. Only steady steps count. At a maximal
age A, the first A + 1 steps build up the lead; the last A + 1 use it up, and `finish_step` validates after the last step of
a run. None of these count. Steps come in bursts of A + 1, one long and the others short, so whole bursts count: as many as
`--steps` asks for, or more.
The variants take turns in several rounds, and the numbers are medians over rounds, so other load affects all variants alike.
With `--at-rest` the learning rate is zero: an optimizer step does all its work but leaves the weights unchanged, so every
step starts from the same weights, with no checkpoint to reload.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dagrl.bench.deadline import BenchDeadline, add_deadline, hurried
from dagrl.bench.plain import train_plain, with_plain_workers
from dagrl.bench.report import Row, add_outputs, count, drawing, print_rows, report_rows
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.config.settings import device_count
from dagrl.errors import ConfigError
from dagrl.rl.rewards import RewardRunner
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.loops.grpo import train_grpo
from dagrl.run.plans import grpo_plans
from dagrl.run.session import Session
from dagrl.run.start import open_session
from dagrl.telemetry.metrics import IDLE, TIMING, TRAIN_MFU, TRAIN_SECONDS, UPDATE, UPDATE_PAUSE
from dagrl.telemetry.record import read_metrics

CONFIG = Path(__file__).with_name("step.yaml")
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row: the loop (plain Ray, synchronous or asynchronous), updates in flight or not, the maximal age."""

    name: str
    plain: bool = False
    enabled: bool = True
    in_flight: bool = True
    age: int = 0


Measured = Mapping[Variant, Sequence[Sequence[Metrics]]]
"""The metrics of the counted steps, by variant and round."""

PLAIN = Variant("plain Ray", plain=True, enabled=False)
ON_REQUEST = (PLAIN,)
"""Measured only if `--variants` names it."""

PHASES = ("generate", "reward", "logprobs", "reference_logprobs", "train_step", "refit")

WAITING = tuple(Variant(f"async, age {age}", in_flight=False, age=age) for age in (2, 4, 8))
"""Updates that wait for running sequences, at ages for which dagrl warns of little gain. Measured last."""

VARIANTS = (
    Variant("sync", enabled=False),
    Variant("async, age 1", in_flight=False, age=1),
    *(Variant(f"in flight, age {age}", age=age) for age in (1, 2, 4, 8)),
    *WAITING,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, CONFIG)
    parser.add_argument("--steps", type=count, help="counted steps per variant, rounded up to whole bursts")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--keep-weights", action="store_true", help="a variant begins where the one before ended")
    weights.add_argument("--at-rest", action="store_true", help="a learning rate of zero: all steps have the same weights")
    parser.add_argument("--rounds", type=count, default=3, help="turns of each variant")
    add_deadline(parser)
    names = "; ".join(variant.name for variant in (*ON_REQUEST, *VARIANTS))
    parser.add_argument(
        "--variants", help=f"separated by semicolons, any of: {names}; default: all but the first {len(ON_REQUEST)}"
    )


def run(options: argparse.Namespace) -> None:
    variants = chosen(options.variants) if options.variants else list(VARIANTS)
    deadline = BenchDeadline(options.deadline)
    with run_config(options) as config:
        reloads = not (options.keep_weights or options.at_rest)
        first_weights = Path(config.output_dir) / "first_weights" if reloads else None
        config = at_rest(config) if options.at_rest else config
        measured = measure(config, variants, first_weights, options.rounds, deadline)
        report_rows(options, (as_rows(config, found) for found in measured), print_table, plot, deadline=deadline)


def add_run_arguments(parser: argparse.ArgumentParser, config: Path) -> None:
    """Adds the options of a benchmark that runs a configuration, by default `config`."""
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override keys of the configuration")
    parser.add_argument("--config", type=Path, default=config, help="configuration to measure; default: %(default)s")
    add_outputs(parser)


@contextmanager
def run_config(options: argparse.Namespace, defaults: Sequence[str] = ()) -> Iterator[Config]:
    """Yields the configuration of the options, with a temporary output directory. `defaults` precede the options."""
    logging.getLogger("dagrl").setLevel("ERROR")  # its warnings concern settings measured on purpose
    with tempfile.TemporaryDirectory() as directory:
        steps = [f"grpo.max_num_steps={options.steps}"] if options.steps else []
        config = load_config(options.config, [*defaults, *options.overrides, *steps, f"output_dir={directory}"])
        yield hurried(config, options.deadline)


def at_rest(config: Config) -> Config:
    """Returns the configuration with a learning rate of zero, which the configuration's validation rejects for a run."""
    megatron = config.policy.megatron_cfg
    optimizer = megatron.optimizer.model_copy(update={"lr": 0.0, "min_lr": 0.0})
    scheduler = megatron.scheduler.model_copy(update={"lr_warmup_init": 0.0})
    megatron = megatron.model_copy(update={"optimizer": optimizer, "scheduler": scheduler})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"megatron_cfg": megatron})})


def chosen(text: str, among: Sequence[Variant] = (*ON_REQUEST, *VARIANTS)) -> list[Variant]:
    """Returns the variants named by `--variants`, in order. Raises ConfigError for an unknown name."""
    named = {variant.name: variant for variant in among}
    names = [name.strip() for name in text.split(";")]
    if unknown := [name for name in names if name not in named]:
        raise ConfigError(f"--variants: found {', '.join(unknown)}; choose from {'; '.join(named)}")
    return [named[name] for name in names]


def measure(
    config: Config, variants: Sequence[Variant], first_weights: Path | None, rounds: int, deadline: BenchDeadline
) -> Iterator[Measured]:
    """Measures every variant in every round in one session, as the deadline allows; yields all results after each.

    Each turn starts from the first weights, saved in `first_weights`, or from the current ones if None.
    """
    if PLAIN in variants:
        config = with_plain_workers(config)
    measured: dict[Variant, list[Sequence[Metrics]]] = {}
    started = time.monotonic()
    with open_session(config, grpo_plans) as session, RewardRunner(config.reward) as reward:
        sys.stderr.write(f"workers ready and warm after {time.monotonic() - started:.1f} s\n")
        session.train.call("snapshot_reference")
        if first_weights is not None:
            session.train.call("save_checkpoint", str(first_weights), deadline=config.timeouts.checkpoint)
        turns = product(range(1, rounds + 1), variants)
        for number, variant in deadline.each(turns, lambda turn: f"{turn[1].name} (round {turn[0]})"):
            started = time.monotonic()
            measured.setdefault(variant, []).append(run_variant(config, session, reward, variant, first_weights))
            sys.stderr.write(f"{variant.name} (round {number}): {time.monotonic() - started:.1f} s\n")
            yield measured


def as_rows(config: Config, measured: Measured) -> list[Row]:
    """Returns a row per measured variant. `speedup` is relative to plain calls, or to the first row without them."""
    rows = [as_row(config, variant, rounds) for variant, rounds in measured.items()]
    base = next((row for row in rows if row["variant"] == PLAIN.name), rows[0])
    return [{**row, "speedup": row["tokens_per_s"] / base["tokens_per_s"]} for row in rows]


def run_variant(
    config: Config, session: Session, reward: RewardRunner, variant: Variant, first_weights: Path | None
) -> Sequence[Metrics]:
    """Returns the metrics of one variant's counted steps. Without `first_weights` it continues from the current weights."""
    counted, burst = counted_steps(config, variant), variant.age + 1
    session = begin_again(session, config, variant, first_weights, burst + counted + burst)
    return run_loop(session, reward, variant)[burst : burst + counted]


def run_loop(session: Session, reward: RewardRunner, variant: Variant) -> Sequence[Metrics]:
    """Returns the metrics that the variant's loop adds to the session's."""
    before = len(read_metrics(session.recorder.paths.metrics))
    session.replays.close_step(tokens=0)
    loop = train_plain if variant.plain else train_grpo
    loop(session, reward)
    session.checkpoints.parts.clear()
    return read_metrics(session.recorder.paths.metrics)[before:]


def counted_steps(config: Config, variant: Variant) -> int:
    """Returns a variant's number of counted steps: `grpo.max_num_steps`, rounded up to whole bursts."""
    burst = variant.age + 1
    return -(-config.grpo.max_num_steps // burst) * burst


def begin_again(session: Session, config: Config, variant: Variant, first_weights: Path | None, steps: int) -> Session:
    """Returns the session for `steps` GRPO steps of `variant`, from the first weights if given."""
    settings = config.grpo.async_grpo.model_copy(
        update={
            "enabled": variant.enabled,
            "in_flight_weight_updates": variant.in_flight,
            "max_trajectory_age_steps": variant.age,
        }
    )
    grpo = config.grpo.model_copy(update={"async_grpo": settings, "max_num_steps": steps})
    session.replays.hold("train")
    if first_weights is not None:
        session.train.call("load_checkpoint", str(first_weights))
    session.checkpoints.state = TrainState(config.sft.max_num_steps)
    return replace(session, config=session.config.model_copy(update={"grpo": grpo}))


def as_row(config: Config, variant: Variant, rounds: Sequence[Sequence[Metrics]]) -> Row:
    """Returns one row: medians over rounds of means over steps, in seconds and in shares from 0 to 1.

    `tokens_per_s` counts trained tokens of prompts and completions; per worker (or GPU) of both roles, low and high are the
    slowest and the fastest round. `phases_s` is the driver's wait per phase (in another thread, if the loop has one).
    `update_s` runs from the end of training until generation has the weights (0 for plain calls, which only refit).
    `update_pause_s` and `policy_age_max` are maxima over all steps. MFU covers the train GPUs, in the optimizer step and
    over the whole step (counting the FLOPs of one optimizer step); 0 if the device's peak is unknown.
    """
    steps, devices = [step for part in rounds for step in part], device_count(config)

    def mean(value: Callable[[Metrics], float]) -> float:
        return median(sum(map(value, part)) / len(part) for part in rounds)

    def of(name: str) -> float:
        return mean(lambda step: float(step.get(name) or 0.0))

    rates = sorted(_total(part, "trained_tokens") / _total(part, TIMING + "total") for part in rounds)
    return {
        "variant": variant.name,
        "rounds": len(rounds),
        "steps": len(rounds[0]),
        "tokens_per_s": median(rates),
        "tokens_per_s_per_worker": median(rates) / devices,
        "tokens_per_s_per_worker_low": rates[0] / devices,
        "tokens_per_s_per_worker_high": rates[-1] / devices,
        "step_s": of(TIMING + "total"),
        "phases_s": {phase: of(TIMING + phase) for phase in PHASES},
        "exposed_generation_s": of(TIMING + "exposed_generation"),
        "idle_train": of(IDLE + "train"),
        "idle_generation": of(IDLE + "generation"),
        "update_s": of(UPDATE),
        "update_pause_s": longest_pause_s(steps),
        "quantum_overhead": of("perf/quantum_overhead"),
        "policy_age_mean": of("staleness/policy_age_mean"),
        "policy_age_max": max(float(step["staleness/policy_age_max"]) for step in steps),
        "mfu_train_step": of(TRAIN_MFU),
        "mfu": mean(lambda step: _share_trained(step) * float(step.get(TRAIN_MFU) or 0.0)),
        "gen_kl_error": of("gen_kl_error"),
    }


def _share_trained(step: Metrics) -> float:
    return float(step.get(TRAIN_SECONDS) or 0.0) / float(step[TIMING + "total"])


def longest_pause_s(steps: Sequence[Metrics]) -> float:
    """Returns the longest time that generation stopped for an update; for plain calls the whole refit, as nothing overlaps
    it."""
    return max(float(step.get(UPDATE_PAUSE) or step.get(TIMING + "refit") or 0.0) for step in steps)


def _total(steps: Sequence[Metrics], name: str) -> float:
    return sum(float(step[name]) for step in steps)


def print_table(rows: Sequence[Row]) -> None:
    numbers = "exposed, idle train, idle gen, update ms, pause ms, quantum +, age, max, MFU train, MFU, KL"
    phases = [phase.replace("_", " ") for phase in PHASES]
    lines = (
        (
            row["variant"], f"{row['tokens_per_s_per_worker']:,.0f}", f"{row['speedup']:.2f}", f"{row['step_s']:.2f}",
            *(f"{row['phases_s'][phase]:.3f}" for phase in PHASES), f"{row['exposed_generation_s']:.2f}",
            f"{row['idle_train']:.0%}", f"{row['idle_generation']:.0%}", f"{row['update_s'] * 1000:.0f}",
            f"{row['update_pause_s'] * 1000:.0f}", f"{row['quantum_overhead']:.2%}", f"{row['policy_age_mean']:.2f}",
            f"{row['policy_age_max']:.0f}", *(f"{row[mfu]:.1%}" if row[mfu] else "" for mfu in ("mfu_train_step", "mfu")),
            f"{row['gen_kl_error']:.1e}",
        )
        for row in rows
    )  # fmt: skip
    columns = ("variant", "tok/s/worker", "x", "step", *phases, *numbers.split(", "))
    print_rows(columns, lines, "seconds per step, by phase; x: speedup")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots tokens per second and worker, with the slowest and fastest round, and idle shares, by variant."""
    places, rate = np.arange(len(rows)), "tokens_per_s_per_worker"
    rates, low, high = (np.array([row[name] for row in rows]) for name in (rate, f"{rate}_low", f"{rate}_high"))
    with drawing(path, columns=2, figsize=(11, 0.6 * len(rows) + 1.8)) as (_, ((speed, idle),)):
        bars = speed.barh(places, rates, xerr=[rates - low, high - rates], color="#4477aa")
        speed.bar_label(bars, [f"{row['speedup']:.2f}x" for row in rows], padding=4)
        speed.set(title="trained tokens/s/worker", yticks=places, yticklabels=[row["variant"] for row in rows])
        speed.margins(x=0.15)
        for role, place, color in (("train", places - 0.2, "#ee6677"), ("generation", places + 0.2, "#228833")):
            idle.barh(place, [row[f"idle_{role}"] for row in rows], 0.4, label=role, color=color)
        idle.set(title="idle share of the step", yticks=places, yticklabels=[], xlim=(0, 1))
        idle.legend()
        for axes in (speed, idle):
            axes.invert_yaxis()
