"""Whole GRPO steps: plain Ray calls, synchronous, asynchronous, updates in flight; from one seed, on the same workers.

    dagrl bench step                                  the setting of bench/step.yaml, minutes on two cores
    dagrl bench step --json F --plot F [--steps N] [--config YAML] [a.b=c ...]

One session serves all ways: the workers, their graphs and the first weights are the same. Lengths are forced
(`policy.generation.forced_lengths`), so that equal seeds make equal work whatever the weights are. Only steady steps
count: at a maximal age A, the A + 1 steps in which the lead is built up and the last A + 1, in which it is used up and
held-out prompts are generated (`finish_step` validates after the last step of a run), do not. Steps come in bursts of A + 1,
a long one and short ones, so whole bursts count: as many as `--steps` asks for, or more.
The ways are measured in turn, several rounds of them, and the numbers are medians over rounds: other work on the machine
then disturbs all ways alike.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.deadline import Deadline, add_deadline, hurried
from bench.report import write_rows
from dagrl.telemetry.metrics import TIMING, UPDATE_PAUSE

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.loops.session import Session
    from dagrl.rewards import RewardRunner

CONFIG = Path(__file__).with_name("step.yaml")
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Way:
    """One row: whether the loop is asynchronous, updates in flight, the maximal age, the order of requests; or no dagrl.

    `in_turn`: without `grpo.overlap_logprobs` and `grpo.overlap_training`, which other ways have where the setting does.
    """

    name: str
    plain: bool = False
    enabled: bool = True
    in_flight: bool = True
    age: int = 0
    order: str = "longest_first"
    in_turn: bool = False


Measured = Mapping[Way, Sequence[Sequence[Metrics]]]
"""By way, round by round, the metrics of the steps that count."""

PLAIN = Way("plain Ray", plain=True, enabled=False)
FIFO = Way("sync, fifo", enabled=False, order="fifo", in_turn=True)
OVERLAPPED = Way("sync, overlapped", enabled=False)
ON_REQUEST = (PLAIN, FIFO, OVERLAPPED)  # measured only when `--ways` names them

WAITING = tuple(Way(f"async, age {age}", in_flight=False, age=age) for age in (2, 4, 8))
"""Updates that wait for running sequences, at ages of which dagrl warns that they bring little: measured last."""

WAYS = (
    Way("sync", enabled=False, in_turn=True),
    Way("async, age 1", in_flight=False, age=1),
    *(Way(f"in flight, age {age}", age=age) for age in (1, 2, 4, 8)),
    *WAITING,
)


@dataclass(frozen=True)
class Result:
    """Medians over rounds of means over steps; seconds, shares of 0 to 1, tokens of prompts and completions trained on.

    `update_pause_s` and `policy_age_max` are the largest of all steps; `speedup` is over the first row.
    """

    way: str
    rounds: int
    steps: int
    tokens_per_s: float
    tokens_per_s_per_worker: float
    step_s: float
    exposed_generation_s: float
    idle_train: float
    idle_generation: float
    update_s: float
    update_pause_s: float
    quantum_overhead: float
    policy_age_mean: float
    policy_age_max: float
    speedup: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench step`."""
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys to set over those of the configuration")
    parser.add_argument("--config", type=Path, default=CONFIG, help="another setting, for other machines and models")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the rows to this file (png, svg)")
    parser.add_argument("--steps", type=int, help="steps of each way that count, rounded up to whole bursts")
    parser.add_argument("--keep-weights", action="store_true", help="a way begins where the one before ended: no checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="times that all ways are measured in turn")
    add_deadline(parser)
    names = "; ".join(way.name for way in (*ON_REQUEST, *WAYS))
    parser.add_argument(
        "--ways", help=f"some of: {names} (separated by semicolons; else all but the first {len(ON_REQUEST)})"
    )


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for."""
    from dagrl.config.file import load_config

    logging.getLogger("dagrl").setLevel("ERROR")  # the warnings are about settings that are measured on purpose
    ways = chosen(options.ways) if options.ways else list(WAYS)
    deadline = Deadline(options.deadline)
    with tempfile.TemporaryDirectory() as directory:
        steps = [f"grpo.max_num_steps={options.steps}"] if options.steps else []
        config = load_config(options.config, [*options.overrides, *steps, f"output_dir={directory}"])
        config = hurried(config, options.deadline)
        results: list[Result] = []
        first_weights = None if options.keep_weights else Path(directory) / "first_weights"
        for measured in measure(config, ways, first_weights, options.rounds, deadline):
            results = as_results(config, measured)
            write_rows(options.json, results, deadline.left_out)
        write_rows(options.json, results, deadline.left_out)
    print_table(results)
    deadline.tell()
    if options.plot and results:
        plot(results, options.plot)


def chosen(text: str, among: Sequence[Way] = (*ON_REQUEST, *WAYS)) -> list[Way]:
    """The ways of `--ways`, in its order. Raises ConfigError for a name that is none of theirs."""
    from dagrl.errors import ConfigError

    named = {way.name: way for way in among}
    names = [name.strip() for name in text.split(";")]
    if unknown := [name for name in names if name not in named]:
        raise ConfigError(f"--ways: found {', '.join(unknown)}; choose from {'; '.join(named)}")
    return [named[name] for name in names]


def measure(
    config: Config, ways: Sequence[Way], first_weights: Path | None, rounds: int, deadline: Deadline
) -> Iterator[Measured]:
    """Every way in every round on one session, as far as the deadline allows; yields all steps so far after each.

    Each time from the first weights, kept in `first_weights`; None: from those that are there. Lengths are forced, so that
    the work is nearly the same.
    """
    from bench.plain import with_plain_workers
    from dagrl.errors import ConfigError
    from dagrl.loops.grpo_step import grpo_plans
    from dagrl.loops.start import open_session
    from dagrl.rewards import RewardRunner

    if OVERLAPPED in ways and not config.grpo.overlap_training:
        raise ConfigError(
            f"--ways has {OVERLAPPED.name!r}, but grpo.overlap_training is false; set it and overlap_logprobs to true"
        )
    if PLAIN in ways:
        config = with_plain_workers(config)
    measured: dict[Way, list[Sequence[Metrics]]] = {}
    started = time.monotonic()
    with open_session(config, grpo_plans(config)) as session, RewardRunner(config.reward) as reward:
        sys.stderr.write(f"workers ready and warm after {time.monotonic() - started:.1f} s\n")
        session.train.call("snapshot_reference")
        if first_weights is not None:
            session.train.call("save_checkpoint", str(first_weights), {}, deadline=config.timeouts.checkpoint)
        turns = product(range(1, rounds + 1), ways)
        for number, way in deadline.each(turns, lambda turn: f"{turn[1].name} (round {turn[0]})"):
            started = time.monotonic()
            measured.setdefault(way, []).append(run_way(config, session, reward, way, first_weights))
            sys.stderr.write(f"{way.name} (round {number}): {time.monotonic() - started:.1f} s\n")
            yield measured


def as_results(config: Config, measured: Measured) -> list[Result]:
    """A row for each way that has been measured."""
    results: list[Result] = []
    for way, rounds in measured.items():
        results.append(as_result(config, way, rounds, results[0] if results else None))
    return results


def run_way(
    config: Config, session: Session, reward: RewardRunner, way: Way, first_weights: Path | None
) -> Sequence[Metrics]:
    """The metrics of the steps of one way that count; without `first_weights` it goes on from those that are there."""
    from bench.plain import train_plain
    from dagrl.loops.async_grpo import train_async
    from dagrl.loops.grpo import train_grpo
    from dagrl.telemetry.record import read_metrics

    counted, burst = counted_steps(config, way), way.age + 1
    begin_again(session, config, way, first_weights, burst + counted + burst)
    before = len(read_metrics(session.paths.metrics))
    session.lap(tokens=0)
    loop = train_plain if way.plain else train_async if way.enabled else train_grpo
    loop(session, reward)
    session.savers.clear()
    first = before + burst
    return read_metrics(session.paths.metrics)[first : first + counted]


def counted_steps(config: Config, way: Way) -> int:
    """Steps of a way that count: `grpo.max_num_steps`, rounded up to whole bursts."""
    burst = way.age + 1
    return -(-config.grpo.max_num_steps // burst) * burst


def begin_again(session: Session, config: Config, way: Way, first_weights: Path | None, steps: int) -> None:
    """Take up the first weights (if any are given), for `steps` GRPO steps by `way`."""
    from dagrl.checkpoint import TrainState
    from dagrl.config.settings import generation_config

    settings = config.grpo.async_grpo.model_copy(
        update={"enabled": way.enabled, "in_flight_weight_updates": way.in_flight, "max_trajectory_age_steps": way.age}
    )
    overlap = {name: False for name in ("overlap_logprobs", "overlap_training") if way.in_turn}
    grpo = config.grpo.model_copy(update={"async_grpo": settings, "max_num_steps": steps, **overlap})
    generation = generation_config(session.config).model_copy(update={"request_order": way.order})
    policy = session.config.policy.model_copy(update={"generation": generation})
    session.config = session.config.model_copy(update={"grpo": grpo, "policy": policy})
    session.hold("train")
    if first_weights is not None:
        session.train.call("load_checkpoint", str(first_weights))
    session.step, session.state = config.sft.max_num_steps, TrainState(config.sft.max_num_steps)


def as_result(config: Config, way: Way, rounds: Sequence[Sequence[Metrics]], first: Result | None) -> Result:
    """One row from the metrics of its steps in each round; the speed-up is over the first row."""
    from dagrl.loops.session import devices_of

    def mean(name: str) -> float:
        return median(sum(float(step.get(name, 0.0)) for step in steps) / len(steps) for steps in rounds)

    rate = median(_total(steps, "trained_tokens") / _total(steps, "timing_s/total") for steps in rounds)
    return Result(
        way=way.name,
        rounds=len(rounds),
        steps=len(rounds[0]),
        tokens_per_s=rate,
        tokens_per_s_per_worker=rate / devices_of(config),
        step_s=mean("timing_s/total"),
        exposed_generation_s=mean("timing_s/exposed_generation"),
        idle_train=mean("idle/train"),
        idle_generation=mean("idle/generation"),
        update_s=mean("timing_s/update"),
        update_pause_s=longest_pause_s([step for steps in rounds for step in steps]),
        quantum_overhead=mean("perf/quantum_overhead"),
        policy_age_mean=mean("staleness/policy_age_mean"),
        policy_age_max=max(float(step["staleness/policy_age_max"]) for steps in rounds for step in steps),
        speedup=rate / first.tokens_per_s if first else 1.0,
    )


def longest_pause_s(steps: Sequence[Metrics]) -> float:
    """The longest time that generation stood still for an update; for plain calls the whole refit, as nothing else runs."""
    return max(float(step.get(UPDATE_PAUSE) or step.get(TIMING + "refit") or 0.0) for step in steps)


def _total(steps: Sequence[Metrics], name: str) -> float:
    return sum(float(step[name]) for step in steps)


def print_table(results: Sequence[Result]) -> None:
    """The rows, for people."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(
        Column("way", no_wrap=True),
        "tokens/s",
        f"of {results[0].way}",
        "step s",
        "exposed s",
        "idle train",
        "idle gen",
        "update ms",
        "pause ms",
        "quantum +",
        "age",
        "max",
    )
    for row in results:
        table.add_row(
            row.way,
            f"{row.tokens_per_s:,.0f}",
            f"{row.speedup:.2f}x",
            f"{row.step_s:.2f}",
            f"{row.exposed_generation_s:.2f}",
            f"{row.idle_train:.0%}",
            f"{row.idle_generation:.0%}",
            f"{row.update_s * 1000:.0f}",
            f"{row.update_pause_s * 1000:.0f}",
            f"{row.quantum_overhead:.2%}",
            f"{row.policy_age_mean:.2f}",
            f"{row.policy_age_max:.0f}",
        )
    Console(width=130).print(table)


def plot(results: Sequence[Result], path: Path) -> None:
    """Tokens a second, and the idle share of each role, by way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, idle) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names, places = [row.way for row in results], range(len(results))
    speed.barh(names, [row.tokens_per_s for row in results], color="#4477aa")
    speed.set(title="trained tokens a second", xlabel="tokens/s")
    idle.barh([place - 0.2 for place in places], [row.idle_train for row in results], 0.4, label="train", color="#ee6677")
    idle.barh(
        [place + 0.2 for place in places], [row.idle_generation for row in results], 0.4, label="generation", color="#228833"
    )
    idle.set(title="idle share of the step", yticks=list(places), yticklabels=names, xlim=(0, 1))
    idle.legend()
    for axes in (speed, idle):
        axes.invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
