"""Puts the recorded samples of a step under another loss, advantage or filter, next to the run's own.

    replay_step(Path("runs/my_run"), step=120, overrides=["loss_fn.ratio_clip_max=0.28"])

Training goes from the newest checkpoint before the step through the recorded samples of the steps between, so asynchronous
runs can be replayed too, and nothing is generated.
"""

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dagrl.config import Config
from dagrl.config.file import dump_config, load_run_config
from dagrl.config.plan import RunPlan, load_algorithm
from dagrl.config.section import Section
from dagrl.config.settings import generation_config
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError, RunError
from dagrl.files import PRIVATE, write_whole
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout.batches import scored_batch
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample
from dagrl.rl.rollout.record import NO_REWARD
from dagrl.rl.rollout.scoring import ScoredGroup, scored_group
from dagrl.run.checkpoint_store import Checkpoint, CheckpointStore
from dagrl.run.loops.optimizer_step import with_counts
from dagrl.run.loops.policy_update import PolicyTrainer, collect_steps, open_trainer, split_minibatches
from dagrl.run.loops.sft import train_sft
from dagrl.run.plans import train_buckets
from dagrl.run.session import Session
from dagrl.run.start import in_scratch, open_session
from dagrl.runtime.shapes import Batch, pad_rows
from dagrl.telemetry.metrics import (
    CLIP_RATIO,
    GRAD_NORM,
    KL,
    VALID_TOKENS,
    StepMetrics,
    join_optimizer_steps,
    merge_step_metrics,
)
from dagrl.telemetry.record import RunPaths, read_metrics
from dagrl.telemetry.rollouts import read_rollouts, rollout_files

logger = logging.getLogger(__name__)

MAY_CHANGE = frozenset({"algorithm", "loss_fn", "advantage"})  # sections of keys that decide how samples are learned from

OF_GRPO = frozenset({"normalize_rewards", "use_leave_one_out_baseline", "overlong_filtering", "reward_shaping"})
"""Keys of `grpo` that do; the others say what is sampled, and when."""

SHOWN = {
    "loss": "loss",
    CLIP_RATIO: "share of clipped tokens",
    KL: "KL to the reference policy",
    VALID_TOKENS: "tokens in the loss",
    GRAD_NORM: "gradient norm",
}
"""Metrics in the table."""


@dataclass(frozen=True)
class MinibatchComparison:
    """A minibatch under the run's loss and another, at the weights that the run had: metrics, and the gradients' cosine."""

    original: StepMetrics
    other: StepMetrics
    cosine: float


def replay_step(directory: Path, step: int, overrides: Sequence[str]) -> list[MinibatchComparison]:
    """Compares the gradients of each minibatch of a step. Raises ConfigError, before anything starts, for what cannot be."""
    config, other = load_run_config(directory), load_run_config(directory, overrides)
    files = rollout_files(directory / "rollouts")
    _check(config, other, directory, step, sorted(files))
    roots = RunPaths.of(config).checkpoints, directory / "checkpoints"  # the second if the run was moved
    start = newest_checkpoint(roots, range(step))
    first = max(start.state.step if start else 0, config.sft.max_num_steps) + 1
    if missing := sorted(set(range(first, step + 1)) - files.keys()):
        raise ConfigError(
            f"--step {step}: training goes from step {first}, but {directory}/rollouts has no samples of step {missing[0]}; "
            "choose a step behind a later checkpoint"
        )
    if any(row["media"] for at in range(first, step + 1) for row in read_rollouts(files[at], ["media"])):
        raise ConfigError(f"{directory} learns from images, which rollouts/ does not have; its steps cannot be replayed")
    with tempfile.TemporaryDirectory() as scratch, open_session(_replayed(config, scratch, start)) as session:
        if session.step < config.sft.max_num_steps:
            train_sft(session)
        with open_trainer(session) as trainer:
            if session.checkpoints.resumed_in("grpo_sampler") is None:
                trainer.start()
            for at in range(first, step):
                metrics, _ = trainer.begin(recorded_groups(config, read_rollouts(files[at])), at).result()
                _check_trained(directory, at, metrics)
            return _compare(session, trainer, other, read_rollouts(files[step]), step)


def report(step: int, compared: Sequence[MinibatchComparison]) -> str:
    """Returns a table of the step's metrics, joined over its minibatches as in `metrics.jsonl`."""
    lines = [f"{f'step {step}':<40}{'run':>14}{'replay':>14}"]
    sides = [
        join_optimizer_steps(side).flat() for side in ([one.original for one in compared], [one.other for one in compared])
    ]
    for name, label in SHOWN.items():
        texts = [f"{side[name]:.6g}" if name in side else "" for side in sides]
        if any(texts):
            lines.append(f"{label:<40}{texts[0]:>14}{texts[1]:>14}")
    cosines = ", ".join(f"{one.cosine:.6f}" for one in compared)
    return "\n".join([*lines, f"{'cosine of the two gradients':<40}{cosines:>28}", ""])


def newest_checkpoint(roots: Sequence[Path], steps: range) -> Checkpoint | None:
    """Returns the newest checkpoint of one of the `steps` in the first directory that has any."""
    for root in roots:
        if found := [each for each in CheckpointStore(root).all() if each.state.step in steps]:
            return found[-1]
    return None


def recorded_groups(config: Config, rows: Sequence[Mapping[str, Any]]) -> list[ScoredGroup]:
    """Returns the groups of a step from its rows in `rollouts/`, with rewards shaped as `config` says."""
    groups = []
    for number, members in groupby(rows, key=lambda row: int(row["group"])):
        group = list(members)
        samples = [_sample(config, row) for row in group]
        rewards = Rewards(
            np.array([row["reward"] for row in group], np.float32), np.array([row["dropped"] != NO_REWARD for row in group])
        )
        rollout = RolloutGroup(number, number, [sample.completion for sample in samples])
        groups.append(scored_group(config, rollout, samples, rewards))
    return groups


def _sample(config: Config, row: Mapping[str, Any]) -> Sample:
    prompt = Prompt(row["prompt"], np.array(row["prompt_tokens"], np.int64), row["reference"], row["source"])
    columns = {name: row[name] for name in ("tokens", "logprobs", "versions", "sampled", "finish_reason", "failure")}
    return Sample(prompt, Episode(prompt, 0, generation_config(config).max_new_tokens, **columns), row["completion"])


def _check(config: Config, other: Config, directory: Path, step: int, steps: Sequence[int]) -> None:
    plan = RunPlan.of(config)
    if not plan.generates or plan.critic or config.policy.router_replay or config.environment.agent is not None:
        raise ConfigError(
            f"{directory}: steps of runs that learn from samples are replayed, without a critic, an agent or "
            "policy.router_replay; `dagrl certify` executes steps of any run again"
        )
    if step not in steps:
        known = f"{steps[0]} to {steps[-1]}" if steps else "no step"
        raise ConfigError(f"--step {step}: {directory}/rollouts has samples of {known}; choose one of them")
    wrong = _changed(config, other) - MAY_CHANGE - {"grpo"}
    wrong |= {f"grpo.{name}" for name in _changed(config.grpo, other.grpo) - OF_GRPO}
    if wrong:
        raise ConfigError(
            f"{min(wrong)} cannot differ in a replay, which learns from recorded samples; override keys of "
            f"{', '.join(sorted(MAY_CHANGE))}, and of grpo {', '.join(sorted(OF_GRPO))}"
        )
    if load_algorithm(other).critic:
        raise ConfigError(
            f"algorithm {other.algorithm} needs values of a critic, and {directory} trained none; choose another"
        )
    if missing := sorted(load_algorithm(other).columns.keys() - plan.algorithm.columns.keys()):
        raise ConfigError(f"the replay needs the column {missing[0]}, which {directory} did not compute")


def _changed(one: Section, other: Section) -> set[str]:
    return {name for name in type(one).model_fields if getattr(one, name) != getattr(other, name)}


def _replayed(config: Config, scratch: str, start: Checkpoint | None) -> Config:
    """Returns the configuration of a run in `scratch` that begins at the checkpoint `start` and keeps nothing."""
    config = in_scratch(config, scratch).with_keys({"checkpointing.resume": start is not None})
    if start is not None:
        paths = RunPaths.of(config)
        paths.checkpoints.mkdir(mode=PRIVATE, parents=True)
        os.symlink(start.directory.absolute(), paths.checkpoints / start.directory.name)
        write_whole(paths.config, dump_config(config))  # marks the directory as a run's
    return config


def _check_trained(directory: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Warns if a step that was trained again differs from the run's record."""
    lines = [line for line in read_metrics(directory / "metrics.jsonl") if line["step"] == step and GRAD_NORM in line]
    for name in ("loss", GRAD_NORM):
        if lines and lines[-1].get(name) != metrics.get(name):
            logger.warning("step %d: %s was %s, and is now %s", step, name, lines[-1].get(name), metrics.get(name))


def _compare(
    session: Session, trainer: PolicyTrainer, other: Config, rows: Sequence[Mapping[str, Any]], step: int
) -> list[MinibatchComparison]:
    """Compares each minibatch, and takes the run's own optimizer step on it."""
    config, compared = session.config, list[MinibatchComparison]()
    batch, theirs = (
        scored_batch(algorithm_of(one), recorded_groups(one, rows)).with_scalars(step=step) for one in (config, other)
    )
    splits = split_minibatches(config, batch)
    trainer.compute_columns(batch, splits, step)
    for number, shards in enumerate(splits):
        minibatch, their_minibatch = (side.share(number, len(splits)) for side in (batch, theirs))
        parts = [_shards(config, minibatch, shards), _shards(other, their_minibatch, shards)]
        if all(any(part["loss_mask"].any() for part in side) for side in parts):
            answers = session.train.call("compare_gradients", *parts, other, deadline=config.timeouts.replay)
            original, others = (merge_step_metrics([answer[side] for answer in answers]) for side in (0, 1))
            one, two, distance = original.shared[GRAD_NORM], others.shared[GRAD_NORM], answers[0][2]
            cosine = (one**2 + two**2 - distance**2) / (2 * one * two) if one and two else float("nan")
            compared.append(MinibatchComparison(original, others, min(1.0, cosine)))
        collect_steps(session.replays, [trainer.submit_step(minibatch, shards)], step)
    if not compared:
        raise RunError(f"step {step} has no minibatch with tokens in the loss of both; choose another step or filter")
    return compared


def _shards(config: Config, batch: Batch, rows: Sequence[Any]) -> list[Batch]:
    """Returns each shard's rows, padded as the run's, with what the loss of the whole minibatch is divided by.

    Another width would change the last bits of sums.
    """
    batch, longest = with_counts(batch), int(batch["lengths"].max())
    bucket = next(bucket for bucket in train_buckets(config, batch.rows) if bucket.tokens >= longest)
    parts = [batch.select(shard) for shard in rows]
    return [Batch({name: pad_rows(column, bucket) for name, column in part.fields.items()}, part.scalars) for part in parts]
