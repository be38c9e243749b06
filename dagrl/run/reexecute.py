"""Executes a step of a run again from the run's own records, and names the first tensor that differs.

    replay_step(Path("runs/grpo_quickstart"), step=12)
    replay_step(Path("runs/grpo_quickstart"), step=12, phase="train_step", cpu=True)

Loads the run's newest checkpoint before the step; without one, starts from the run's first policy. There are two ways on:

- The run's loop takes the steps up to `step` once more: data order, seeds, generation, rewards, training. Equal layouts on
  equal machines compute equal numbers, so the comparison is exact.
- Each phase gets recorded inputs (`dagrl.run.loops.recorded`): for a single phase, for asynchronous runs, and on a CPU or in
  another layout, where a token that is sampled differently would change everything after it.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.config import CheckpointConfig, Config
from dagrl.config.file import dump_config, load_run_config
from dagrl.config.settings import compares, generates, samples_per_step
from dagrl.errors import ConfigError, StopRequestedError
from dagrl.files import PRIVATE, write_whole
from dagrl.machine import VISIBLE
from dagrl.run.checkpoint_store import CheckpointStore
from dagrl.run.comparison import BOUNDS, EXACT, JUDGED, MADE, SCORED, Comparison, WeightDifference, compare, compare_rollouts
from dagrl.run.session import LastStep, Session
from dagrl.telemetry.record import RunPaths, lock_run, read_metrics
from dagrl.telemetry.rollouts import read_rollouts, rollout_files

if TYPE_CHECKING:
    from dagrl.run.loops.recorded import Recorded

logger = logging.getLogger(__name__)

Run = Callable[[Config, LastStep], None]
"""Runs a configuration and stops after the step that is given."""

Line = Mapping[str, Any]

COLUMNS_OF = {"logprobs": ("train_logprobs", "entropy"), "reference_logprobs": ("reference_logprobs",)}
"""Columns of the rollouts that a phase computes."""


@dataclass(frozen=True)
class Request:
    """What to execute again: a step, or one `phase` of it, on this machine's CPUs with `cpu`, with `overrides` of keys."""

    directory: Path
    step: int
    phase: str | None = None
    cpu: bool = False
    overrides: Sequence[str] = ()

    @property
    def exact(self) -> bool:
        """Whether the step must be equal bit for bit."""
        return not self.cpu and not self.overrides


def replay_step(request: Request, run: Run) -> Comparison:
    """Executes a step again and compares it with the run's records.

    What it writes is in `<directory>/replays/step_<step>`. Raises ConfigError for a directory that is no run's, a step or a
    phase that the run has not recorded; RunError if nothing was compared.
    """
    config = load_run_config(request.directory, request.overrides)
    config = on_cpu(config) if request.cpu else config
    lines = _recorded_lines(request.directory, request.step)
    phases = _chosen_phases(config, request)
    roots = (RunPaths.of(config).checkpoints, request.directory / "checkpoints")  # the second if the run was moved
    start = newest_checkpoint(roots, range(_before(config, request, phases)))
    saved = newest_checkpoint(roots, range(request.step, request.step + 1))
    weights, again = list[tuple[int, list[WeightDifference]]](), _prepare(config, request, start)
    last = LastStep(request.step)
    if saved is not None and (phases is None or "train_step" in phases):
        last = LastStep(request.step, partial(_compare_weights, saved, weights))
    logger.info("executing from %s", start.name if start else "the first policy")
    recorded = None if phases is None else _recorded(request.directory, last, phases)
    try:
        if recorded is None:
            run(again, last)
        else:
            from dagrl.run.loops.recorded import run_recorded

            run_recorded(again, recorded)
    except StopRequestedError:
        logger.info("stopped after step %d", request.step)
    comparison = _compare(request, again, lines, recorded)
    for compared, differences in weights:
        comparison.add_weights(compared, differences, _step_sizes(again, lines, comparison))
    return comparison


def _compare_weights(saved: Path, found: list[tuple[int, list[WeightDifference]]], session: Session) -> None:
    """Compares each train worker's weights with a checkpoint, which they then hold; see `compare_checkpoint`."""
    if "compare_checkpoint" not in session.train.role.methods:
        return
    session.replays.hold("train", keep_generation_weights=True)
    directory = str(saved.absolute() / "train")
    found.extend(session.train.call("compare_checkpoint", directory, deadline=session.config.timeouts.checkpoint))


def on_cpu(config: Config) -> Config:
    """Returns the configuration for workers without GPUs, in the same layout and precision, and hides this machine's GPUs.

    What only GPUs have is off: CUDA graphs, FP8, and roles that share a GPU.
    """
    os.environ[VISIBLE] = ""
    changed: dict[str, object] = {
        "cluster.address": None,
        "cluster.num_gpus": 0,
        "cluster.gpus_per_worker": 0,
        "policy.megatron_cfg.cuda_graphs": False,
        "policy.reference_weights": "host",
    }
    if config.policy.generation is not None:
        vllm = config.policy.generation.vllm_cfg
        engine = {
            "enforce_eager": True,
            "num_scheduler_steps": None,
            "kv_cache_dtype": "auto",
            "precision": None if vllm.precision == "fp8" else vllm.precision,
            "kv_cache_memory_bytes": vllm.kv_cache_memory_bytes or 256 << 20,
        }
        changed |= {f"policy.generation.vllm_cfg.{name}": value for name, value in engine.items()}
        changed["policy.generation.colocated.enabled"] = False
    return config.with_keys(changed)


def _recorded_lines(directory: Path, step: int) -> list[Line]:
    """The lines of the run's metrics up to `step`."""
    file = directory / "metrics.jsonl"
    lines = read_metrics(file) if file.is_file() else []
    steps = [int(line["step"] or 0) for line in lines]
    if step < 1 or step not in steps:
        raise ConfigError(f"--step {step}: {directory} has recorded steps 1 to {max(steps, default=0)}; choose one of them")
    return [line for line, at in zip(lines, steps, strict=True) if at <= step]


def _chosen_phases(config: Config, request: Request) -> tuple[str, ...] | None:
    """The phases that get recorded inputs; None if the run's loop executes the step."""
    if not generates(config) or request.step <= config.sft.max_num_steps:
        only = "preference_step" if compares(config) else "demonstration_step"
        if request.phase not in (None, only):
            raise ConfigError(f"--phase {request.phase}: step {request.step} can be executed again by the phase {only}")
        return None
    from dagrl.run.loops.recorded import sample_phases

    known = sample_phases(config)
    if request.phase is not None and request.phase not in known:
        raise ConfigError(f"--phase {request.phase}: the records have the inputs of {', '.join(known)}; choose one of them")
    asynchronous = config.grpo.async_grpo  # time decides which version makes a token
    if request.phase is None and request.exact and not (asynchronous.enabled and asynchronous.max_trajectory_age_steps):
        return None
    if config.policy.router_replay or (config.environment.agent is not None and config.environment.max_conversations > 1):
        what = "the experts of each token" if config.policy.router_replay else "an agent's further conversations"
        raise ConfigError(
            f"{request.directory}: rollouts/ does not have {what}, which training on its samples needs. Only whole steps of "
            "a synchronous run can be executed again, in its own layout: leave out --phase, --cpu and overrides"
        )
    return (request.phase,) if request.phase is not None else known


def _before(config: Config, request: Request, phases: Collection[str] | None) -> int:
    """The step before which the checkpoint must be: that of the oldest version that is needed."""
    if phases is None or "generate" not in phases:
        return request.step
    from dagrl.run.loops.recorded import first_version

    files = rollout_files(request.directory / "rollouts")
    rows = read_rollouts(files[request.step]) if request.step in files else []
    return min(request.step, max(first_version(rows), config.sft.max_num_steps) + 1)


def _recorded(directory: Path, last: LastStep, phases: Sequence[str]) -> Recorded:
    from dagrl.run.loops.recorded import Recorded, made_by_later_versions

    recorded = Recorded(directory, last, phases)
    rows = recorded.rows(last.number)
    later = made_by_later_versions(rows) if "generate" in phases else 0
    if later:
        logger.info("%d tokens were made after a weight update in flight, and are taken from the records", later)
    return recorded


def newest_checkpoint(roots: Iterable[Path], steps: range) -> Path | None:
    """Returns the newest checkpoint of one of the `steps` in the first directory that has any."""
    for root in roots:
        if found := [each.directory for each in CheckpointStore(root).all() if each.state.step in steps]:
            return found[-1]
    return None


def _prepare(config: Config, request: Request, start: Path | None) -> Config:
    """The run's configuration in a directory of its own, which has a link to the checkpoint `start`.

    It writes no checkpoints, and nothing to trackers.
    """
    silent = ("tensorboard", "wandb", "mlflow", "trace", "plot")
    config = config.with_keys(
        {
            "name": f"step_{request.step:06d}",
            "output_dir": str(request.directory.absolute() / "replays"),
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


def _compare(request: Request, again: Config, lines: Sequence[Line], recorded: Recorded | None) -> Comparison:
    found, bounds = RunPaths.of(again).directory, EXACT if request.exact else BOUNDS[again.policy.precision]
    if recorded is None:
        return compare(request.directory, found, lines, request.step, bounds=bounds)
    comparison = compare(request.directory, found, lines, request.step, columns=(), only_found=True, bounds=bounds)
    metrics, comparison.differences = comparison.differences, []
    rows, files = recorded.rows(request.step), rollout_files(found / "rollouts")
    if recorded.made:
        compare_rollouts(comparison, request.step, rows, recorded.made, MADE)
    if request.step in files and (columns := _computed(recorded.phases)):
        compare_rollouts(comparison, request.step, rows, read_rollouts(files[request.step]), columns)
    comparison.differences += metrics
    return comparison


def _computed(phases: Collection[str]) -> list[str]:
    """The columns of the step's rollouts that `phases` compute."""
    scored = {column for phase in phases for column in COLUMNS_OF.get(phase, ())}
    judged = [name for name in JUDGED if "train_step" in phases]
    return [*judged, *(name for name in SCORED if name in scored)]


def _step_sizes(config: Config, lines: Sequence[Line], comparison: Comparison) -> float:
    """The sum of the learning rates of the optimizer steps that were executed."""
    size = config.policy.train_global_batch_size
    return sum(
        float(line["lr"]) * (math.ceil(samples_per_step(config) / size) if "reward/mean" in line else 1)
        for line in lines
        if "lr" in line and comparison.first_step <= int(line["step"])
    )
