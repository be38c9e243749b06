"""Executes a step of a run again from the run's own records, and names the first tensor that differs.

    replay_step(Path("runs/grpo_quickstart"), step=12)

Loads the run's newest checkpoint before the step; without one, starts from the run's first policy. Executes the steps up to
`step` with the run's own configuration, data order and seeds, and compares them with `metrics.jsonl` and `rollouts/`. The
comparison is exact: equal layouts on equal machines compute equal numbers.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.config import Config
from dagrl.config.file import dump_config, load_config
from dagrl.config.settings import generates
from dagrl.errors import ConfigError, RunError, StopRequestedError
from dagrl.files import PRIVATE, write_whole
from dagrl.run.checkpoints import CheckpointStore
from dagrl.telemetry.metrics import TIMING, is_measured
from dagrl.telemetry.record import RunPaths, lock_run, read_metrics
from dagrl.telemetry.rollouts import read_rollouts, rollout_files

logger = logging.getLogger(__name__)

WALL_TIME = TIMING + "total"  # of trained steps; a validation before the first step has none

OF_REPLAYS = frozenset({"replays", "padding_share"})
"""How a step was executed, not what it computed: a run that resumes refits once more, and quanta depend on the clock."""

COLUMNS = (
    "source",
    "prompt_tokens",
    "tokens",
    "sampled",
    "versions",
    "logprobs",
    "finish_reason",
    "reward",
    "advantage",
    "valid",
    "train_logprobs",
    "reference_logprobs",
    "entropy",
)
"""Columns of a rollout in the order in which a step computes them: the first that differs is nearest to the cause."""

Run = Callable[[Config, int], None]
"""Runs a configuration and stops after the step that is given."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """A value of `step` that was not reproduced; `name` is a column of the rollouts or a metric."""

    step: int
    name: str
    where: str
    recorded: object
    found: object

    def describe(self) -> str:
        """One line."""
        return f"step {self.step}: {self.name}{self.where} was {self.recorded!r}, and is now {self.found!r}"


@dataclass(frozen=True)
class Comparison:
    """What was compared, over all steps executed, and what differs, the earliest first."""

    first_step: int
    last_step: int
    tokens: int
    metrics: int
    differences: tuple[Difference, ...]


def replay_step(directory: Path, step: int, run: Run) -> Comparison:
    """Executes `step` of the run in `directory` again and compares it with the run's records.

    What it writes is in `<directory>/replays/step_<step>`. Raises ConfigError for a directory that is no run's, a step that
    the run has not recorded, or a run whose samples depend on time; RunError if nothing was compared.
    """
    config = _read(directory)
    recorded = _recorded(directory, step)
    start = newest_before(RunPaths.of(config).checkpoints, directory / "checkpoints", step)
    again = _prepare(config, directory, step, start)
    logger.info("executing from %s", start.name if start else "the first policy")
    try:
        run(again, step)
    except StopRequestedError:
        logger.info("stopped after step %d", step)
    return compare(directory, RunPaths.of(again).directory, recorded, step)


def _read(directory: Path) -> Config:
    file = directory / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{directory} has no config.yaml; expected the directory of a run, such as runs/grpo_quickstart")
    config = load_config(file)
    asynchronous = config.grpo.async_grpo
    if asynchronous.enabled and asynchronous.max_trajectory_age_steps and generates(config):
        raise ConfigError(
            f"{directory} is an asynchronous run: which version makes a token depends on time, so its steps cannot be "
            "executed again. Runs with grpo.async_grpo.enabled=false, or max_trajectory_age_steps=0, can"
        )
    return config


def _recorded(directory: Path, step: int) -> list[Line]:
    """The lines of the run's metrics up to `step`."""
    file = directory / "metrics.jsonl"
    lines = read_metrics(file) if file.is_file() else []
    steps = [int(line["step"] or 0) for line in lines]
    if step < 1 or step not in steps:
        raise ConfigError(f"--step {step}: {directory} has recorded steps 1 to {max(steps, default=0)}; choose one of them")
    return [line for line, at in zip(lines, steps, strict=True) if at <= step]


def newest_before(configured: Path, within: Path, step: int) -> Path | None:
    """Returns the newest checkpoint before `step` in the configured directory, or in the run's own if it was moved."""
    for root in (configured, within):
        found = [each.directory for each in CheckpointStore(root).all() if each.state.step < step]
        if found:
            return found[-1]
    return None


def _prepare(config: Config, directory: Path, step: int, start: Path | None) -> Config:
    """The run's configuration in a directory of its own, which has a link to the checkpoint `start`.

    It writes no checkpoints, and nothing to trackers.
    """
    output, name = directory.absolute() / "replays", f"step_{step:06d}"
    files = {"enabled": False, "resume": start is not None, "checkpoint_dir": None, "export_hf": False}
    silent = {f"{tracker}_enabled": False for tracker in ("tensorboard", "wandb", "mlflow", "trackio", "trace", "plot")}
    config = config.model_copy(
        update={
            "name": name,
            "output_dir": str(output),
            "on_failure": "stop",
            "checkpointing": config.checkpointing.model_copy(update=files),
            "logger": config.logger.model_copy(update=silent),
        }
    )
    paths = RunPaths.of(config)
    with lock_run(paths):
        if paths.directory.exists():
            shutil.rmtree(paths.directory)
        if start is not None:
            paths.checkpoints.mkdir(mode=PRIVATE, parents=True)
            os.symlink(start.absolute(), paths.checkpoints / start.name)
            write_whole(paths.config, dump_config(config))  # marks the directory as a run's
    return config


def compare(recorded: Path, found: Path, lines: Sequence[Line], step: int) -> Comparison:
    """Compares the steps that `found` executed with those that `recorded` has."""
    executed = [line for line in read_metrics(found / "metrics.jsonl") if int(line["step"] or 0) <= step]
    trained = sorted({int(line["step"] or 0) for line in executed if WALL_TIME in line})
    if step not in trained:
        raise RunError(f"step {step} was not executed: {found} has {trained}")
    before, now = (rollout_files(directory / "rollouts") for directory in (recorded, found))
    differences: list[Difference] = []
    tokens = metrics = 0
    for at in trained:
        if at in before and at in now:
            old, new = read_rollouts(before[at]), read_rollouts(now[at])
            tokens += sum(len(row["tokens"]) for row in old)
            differences += rollout_differences(at, old, new)
        old_line, new_line = (_line(of, at) for of in (lines, executed))
        metrics += len(old_line)
        differences += metric_differences(at, old_line, new_line)
    return Comparison(trained[0], step, tokens, metrics, tuple(differences))


def _line(lines: Sequence[Line], step: int) -> dict[str, Any]:
    """The metrics of the line of a trained step that do not depend on how the step was executed."""
    found = next(line for line in lines if line["step"] == step and WALL_TIME in line)
    return {name: value for name, value in found.items() if not is_measured(name) and name not in OF_REPLAYS}


def rollout_differences(step: int, recorded: Sequence[Line], found: Sequence[Line]) -> list[Difference]:
    """Returns the first difference of each column, columns in the order of `COLUMNS`."""
    if len(recorded) != len(found):
        return [Difference(step, "samples", "", len(recorded), len(found))]
    return [
        difference
        for column in COLUMNS
        if (difference := _first(step, column, [row[column] for row in recorded], [row[column] for row in found]))
    ]


def _first(step: int, column: str, recorded: Sequence[Any], found: Sequence[Any]) -> Difference | None:
    for row, (old, new) in enumerate(zip(recorded, found, strict=True)):
        if same(old, new):
            continue
        if not isinstance(old, list) or not isinstance(new, list):
            return Difference(step, column, f" of sample {row}", old, new)
        if len(old) != len(new):
            return Difference(step, column, f" of sample {row}", f"{len(old)} values", f"{len(new)} values")
        at = next(index for index, pair in enumerate(zip(old, new, strict=True)) if not same(*pair))
        return Difference(step, column, f" of sample {row} at token {at}", old[at], new[at])
    return None


def metric_differences(step: int, recorded: Line, found: Line) -> list[Difference]:
    """Returns every metric that differs, or that only one side has (None), the loss first."""
    names = sorted(recorded.keys() | found.keys(), key=lambda name: (name != "loss", name))
    pairs = ((name, recorded.get(name), found.get(name)) for name in names)
    return [Difference(step, name, "", old, new) for name, old, new in pairs if not same(old, new)]


def same(old: object, new: object) -> bool:
    """Whether two values of a record are equal bit for bit; NaN equals NaN."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(same(*pair) for pair in zip(old, new, strict=True))
    return old == new or (old != old and new != new)
