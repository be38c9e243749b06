"""Executes steps of a run again from its newest checkpoint before them, and names the first tensor that differs.

    replay_step(Path("runs/grpo_quickstart"), step=12, run=train)

The run's own loop takes the steps up to `step` once more: data order, seeds, generation, rewards, training. Equal layouts on
equal machines compute equal numbers, so the comparison is exact.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from dagrl.config import CheckpointConfig, Config
from dagrl.config.file import dump_config, load_run_config
from dagrl.config.plan import RunPlan
from dagrl.config.roles import TRAIN
from dagrl.errors import ConfigError, StopRequestedError
from dagrl.files import PRIVATE, write_whole
from dagrl.run.checkpoint_store import CheckpointStore
from dagrl.run.checkpoints import verify_role
from dagrl.run.comparison import Comparison, compare
from dagrl.run.session import LastStep, Session
from dagrl.telemetry.record import RunPaths, lock_run, read_metrics

logger = logging.getLogger(__name__)

Run = Callable[[Config, LastStep], None]
"""Runs a configuration and stops after the step that is given."""


def replay_step(directory: Path, step: int, run: Run) -> Comparison:
    """Executes a step of the run in `directory` again and compares it with the run's records.

    What it writes is in `<directory>/replays/step_<step>`. Raises ConfigError for a directory that is no run's, and for a
    step that the run has not recorded or that cannot be executed again.
    """
    config = load_run_config(directory)
    _check_step(config, directory, step)
    roots = (RunPaths.of(config).checkpoints, directory / "checkpoints")  # the second if the run was moved
    start, saved = newest_checkpoint(roots, range(step)), newest_checkpoint(roots, range(step, step + 1))
    again, weights = _prepare(config, directory, step, start), list[tuple[int, list[str]]]()

    def compare_weights(session: Session) -> None:
        """Compares each train worker's weights with the checkpoint after the step, which they then hold."""
        if saved is None or "compare_checkpoint" not in session.train.role.methods:
            return
        deadline = session.config.timeouts.checkpoint
        session.replays.hold(TRAIN, keep_generation_weights=True)
        verify_role(session.train, TRAIN, saved, deadline)
        weights.extend(session.train.call("compare_checkpoint", str(saved.absolute() / TRAIN), deadline=deadline))

    logger.info("executing from %s", start.name if start else "the first policy")
    try:
        run(again, LastStep(step, compare_weights))
    except StopRequestedError:
        logger.info("stopped after step %d", step)
    comparison = compare(directory, RunPaths.of(again).directory, step)
    for compared, differences in weights:
        comparison.weights += compared
        comparison.differences += [f"step {step}: {difference}" for difference in differences]
    return comparison


def _check_step(config: Config, directory: Path, step: int) -> None:
    file = directory / "metrics.jsonl"
    steps = [int(line["step"] or 0) for line in (read_metrics(file) if file.is_file() else [])]
    if step < 1 or step not in steps:
        raise ConfigError(f"--step {step}: {directory} has recorded steps 1 to {max(steps, default=0)}; choose one of them")
    if RunPlan.of(config).generates and step > config.sft.max_num_steps and config.grpo.async_grpo.max_age_steps:
        raise ConfigError(
            f"--step {step}: {directory} trained asynchronously, and time decided which policy version made each token; "
            "steps of SFT and of synchronous runs can be executed again"
        )


def newest_checkpoint(roots: Iterable[Path], steps: range) -> Path | None:
    """Returns the newest checkpoint of one of the `steps` in the first directory that has any."""
    for root in roots:
        if found := [each.directory for each in CheckpointStore(root).all() if each.state.step in steps]:
            return found[-1]
    return None


def _prepare(config: Config, directory: Path, step: int, start: Path | None) -> Config:
    """Returns the run's configuration in a directory of its own, which has a link to the checkpoint `start`.

    It writes no checkpoints, and nothing to trackers.
    """
    silent = ("tensorboard", "wandb", "trace")
    config = config.with_keys(
        {
            "name": f"step_{step:06d}",
            "output_dir": str(directory.absolute() / "replays"),
            "on_failure": "stop",
            "checkpointing": CheckpointConfig(enabled=False, resume=start is not None, export_hf=False),
            **{f"logger.{name}_enabled": False for name in silent},
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
