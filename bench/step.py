"""Measures whole GRPO steps: plain Ray calls, synchronous, asynchronous, in-flight updates; same seed and workers.

    dagrl bench step                                  with bench/step.yaml; takes minutes on two cores
    dagrl bench step --json F --plot F [--steps N] [--config YAML] [a.b=c ...]

All variants run in one session with the same workers, graphs and first weights. Sequence lengths are forced
(`policy.generation.forced_lengths`), so equal seeds give equal work for any weights. Only steady steps count. At a maximal
age A, the first A + 1 steps build up the lead; the last A + 1 use it up, and `finish_step` validates after the last step of
a run. None of these count. Steps come in bursts of A + 1, one long and the others short, so whole bursts count: as many as
`--steps` asks for, or more.
The variants take turns in several rounds, and the numbers are medians over rounds, so other load affects all variants alike.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dagrl.bench.deadline import BenchDeadline, add_deadline, hurried
from dagrl.bench.report import report_while_measuring
from dagrl.telemetry.metrics import TIMING, UPDATE_PAUSE

if TYPE_CHECKING:
    from dagrl.config import Config
    from dagrl.rl.rewards import RewardRunner
    from dagrl.run.session import Session

CONFIG = Path(__file__).with_name("step.yaml")
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row: the loop (plain Ray, synchronous or asynchronous), updates in flight or not, the maximal age, the request
    order.

    `in_turn` switches `grpo.overlap_logprobs` and `grpo.overlap_training` off; other variants keep the configuration's
    values.
    """

    name: str
    plain: bool = False
    enabled: bool = True
    in_flight: bool = True
    age: int = 0
    order: str = "longest_first"
    in_turn: bool = False


Measured = Mapping[Variant, Sequence[Sequence[Metrics]]]
"""The metrics of the counted steps, by variant and round."""

PLAIN = Variant("plain Ray", plain=True, enabled=False)
FIFO = Variant("sync, fifo", enabled=False, order="fifo", in_turn=True)
OVERLAPPED = Variant("sync, overlapped", enabled=False)
ON_REQUEST = (PLAIN, FIFO, OVERLAPPED)  # measured only if `--variants` names them

WAITING = tuple(Variant(f"async, age {age}", in_flight=False, age=age) for age in (2, 4, 8))
"""Updates that wait for running sequences, at ages for which dagrl warns of little gain. Measured last."""

VARIANTS = (
    Variant("sync", enabled=False, in_turn=True),
    Variant("async, age 1", in_flight=False, age=1),
    *(Variant(f"in flight, age {age}", age=age) for age in (1, 2, 4, 8)),
    *WAITING,
)


@dataclass(frozen=True)
class StepRow:
    """Medians over rounds of means over steps: seconds, shares from 0 to 1, and trained tokens of prompts and completions.

    `update_pause_s` and `policy_age_max` are maxima over all steps. `speedup` is relative to the first row.
    """

    variant: str
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
    """Adds the options of `dagrl bench step`."""
    add_run_arguments(parser, CONFIG)
    parser.add_argument("--steps", type=int, help="counted steps per variant, rounded up to whole bursts")
    parser.add_argument(
        "--keep-weights", action="store_true", help="a variant begins where the one before ended: no checkpoint"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    add_deadline(parser)
    names = "; ".join(variant.name for variant in (*ON_REQUEST, *VARIANTS))
    parser.add_argument(
        "--variants", help=f"separated by semicolons, any of: {names}; default: all but the first {len(ON_REQUEST)}"
    )


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested files."""
    variants = chosen(options.variants) if options.variants else list(VARIANTS)
    deadline = BenchDeadline(options.deadline)
    with run_config(options) as config:
        first_weights = None if options.keep_weights else Path(config.output_dir) / "first_weights"
        measured = measure(config, variants, first_weights, options.rounds, deadline)
        report_while_measuring(options, deadline, (as_rows(config, found) for found in measured), print_table, plot)


def add_run_arguments(parser: argparse.ArgumentParser, config: Path) -> None:
    """Adds the options of a benchmark that runs a configuration, by default `config`."""
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override keys of the configuration")
    parser.add_argument("--config", type=Path, default=config, help="configuration to measure; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--plot", type=Path, help="plot the rows to this file (png, svg)")


@contextmanager
def run_config(options: argparse.Namespace) -> Iterator[Config]:
    """Yields the configuration of the options, with a temporary output directory."""
    from dagrl.config.file import load_config

    logging.getLogger("dagrl").setLevel("ERROR")  # its warnings concern settings measured on purpose
    with tempfile.TemporaryDirectory() as directory:
        steps = [f"grpo.max_num_steps={options.steps}"] if options.steps else []
        config = load_config(options.config, [*options.overrides, *steps, f"output_dir={directory}"])
        yield hurried(config, options.deadline)


def chosen(text: str, among: Sequence[Variant] = (*ON_REQUEST, *VARIANTS)) -> list[Variant]:
    """Returns the variants named by `--variants`, in order. Raises ConfigError for an unknown name."""
    from dagrl.errors import ConfigError

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
    from dagrl.bench.plain import with_plain_workers
    from dagrl.errors import ConfigError
    from dagrl.rl.rewards import RewardRunner
    from dagrl.run.plans import grpo_plans
    from dagrl.run.start import open_session

    if OVERLAPPED in variants and not config.grpo.overlap_training:
        raise ConfigError(
            f"--variants has {OVERLAPPED.name!r}, but grpo.overlap_training is false; set it and overlap_logprobs to true"
        )
    if PLAIN in variants:
        config = with_plain_workers(config)
    measured: dict[Variant, list[Sequence[Metrics]]] = {}
    started = time.monotonic()
    with open_session(config, grpo_plans) as session, RewardRunner(config.reward) as reward:
        sys.stderr.write(f"workers ready and warm after {time.monotonic() - started:.1f} s\n")
        session.train.call("snapshot_reference")
        if first_weights is not None:
            session.train.call("save_checkpoint", str(first_weights), {}, deadline=config.timeouts.checkpoint)
        turns = product(range(1, rounds + 1), variants)
        for number, variant in deadline.each(turns, lambda turn: f"{turn[1].name} (round {turn[0]})"):
            started = time.monotonic()
            measured.setdefault(variant, []).append(run_variant(config, session, reward, variant, first_weights))
            sys.stderr.write(f"{variant.name} (round {number}): {time.monotonic() - started:.1f} s\n")
            yield measured


def as_rows(config: Config, measured: Measured) -> list[StepRow]:
    """Returns a row per measured variant."""
    results: list[StepRow] = []
    for variant, rounds in measured.items():
        results.append(as_row(config, variant, rounds, results[0] if results else None))
    return results


def run_variant(
    config: Config, session: Session, reward: RewardRunner, variant: Variant, first_weights: Path | None
) -> Sequence[Metrics]:
    """Returns the metrics of one variant's counted steps. Without `first_weights` it continues from the current weights."""
    from dagrl.bench.plain import train_plain
    from dagrl.run.loops.async_grpo import train_async
    from dagrl.run.loops.grpo import train_grpo
    from dagrl.telemetry.record import read_metrics

    counted, burst = counted_steps(config, variant), variant.age + 1
    session = begin_again(session, config, variant, first_weights, burst + counted + burst)
    before = len(read_metrics(session.recorder.paths.metrics))
    session.replays.close_step(tokens=0)
    loop = train_plain if variant.plain else train_async if variant.enabled else train_grpo
    loop(session, reward)
    session.checkpoints.parts.clear()
    first = before + burst
    return read_metrics(session.recorder.paths.metrics)[first : first + counted]


def counted_steps(config: Config, variant: Variant) -> int:
    """Returns a variant's number of counted steps: `grpo.max_num_steps`, rounded up to whole bursts."""
    burst = variant.age + 1
    return -(-config.grpo.max_num_steps // burst) * burst


def begin_again(session: Session, config: Config, variant: Variant, first_weights: Path | None, steps: int) -> Session:
    """Returns the session for `steps` GRPO steps of `variant`, from the first weights if given."""
    from dataclasses import replace

    from dagrl.config.settings import generation_config
    from dagrl.run.checkpoints import TrainState

    settings = config.grpo.async_grpo.model_copy(
        update={
            "enabled": variant.enabled,
            "in_flight_weight_updates": variant.in_flight,
            "max_trajectory_age_steps": variant.age,
        }
    )
    overlap = {name: False for name in ("overlap_logprobs", "overlap_training") if variant.in_turn}
    grpo = config.grpo.model_copy(update={"async_grpo": settings, "max_num_steps": steps, **overlap})
    generation = generation_config(session.config).model_copy(update={"request_order": variant.order})
    policy = session.config.policy.model_copy(update={"generation": generation})
    session.replays.hold("train")
    if first_weights is not None:
        session.train.call("load_checkpoint", str(first_weights))
    session.checkpoints.state = TrainState(config.sft.max_num_steps)
    return replace(session, config=session.config.model_copy(update={"grpo": grpo, "policy": policy}))


def as_row(config: Config, variant: Variant, rounds: Sequence[Sequence[Metrics]], first: StepRow | None) -> StepRow:
    """Returns one row from the metrics of its steps in each round; the speedup is relative to the first row."""
    from dagrl.config.settings import device_count

    def mean(name: str) -> float:
        return median(sum(float(step.get(name, 0.0)) for step in steps) / len(steps) for steps in rounds)

    rate = median(_total(steps, "trained_tokens") / _total(steps, "timing_s/total") for steps in rounds)
    return StepRow(
        variant=variant.name,
        rounds=len(rounds),
        steps=len(rounds[0]),
        tokens_per_s=rate,
        tokens_per_s_per_worker=rate / device_count(config),
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
    """Returns the longest time that generation stopped for an update; for plain calls the whole refit, as nothing overlaps
    it."""
    return max(float(step.get(UPDATE_PAUSE) or step.get(TIMING + "refit") or 0.0) for step in steps)


def _total(steps: Sequence[Metrics], name: str) -> float:
    return sum(float(step[name]) for step in steps)


def print_table(results: Sequence[StepRow]) -> None:
    """Prints the rows."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(
        Column("variant", no_wrap=True),
        "tokens/s",
        f"of {results[0].variant}",
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
            row.variant,
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


def plot(results: Sequence[StepRow], path: Path) -> None:
    """Plots tokens per second and the idle share of each role, by variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, idle) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names, places = [row.variant for row in results], range(len(results))
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
