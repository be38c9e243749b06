"""Executes a step on generated samples again from its records. Read it from top to bottom.

Each phase gets the inputs that the records have: training and log-probabilities the recorded samples, generation the
recorded prompts, seeds and policy versions. So a phase can be executed alone, in any layout, and in runs in which time
decided which version made a token. The steps before it, from the checkpoint on, train on what is recorded of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dagrl.config import Config
from dagrl.config.settings import algorithm_name, generation_config
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout.batches import row_ids, sample_keys, scored_batch
from dagrl.rl.rollout.episodes import TOKEN_FIELDS, Episode, RolloutGroup, Sample, request_seeds
from dagrl.rl.rollout.record import KEPT, NO_REWARD
from dagrl.rl.rollout.rollouts import Rollouts
from dagrl.rl.rollout.scoring import ScoredGroup, scored_group
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.engines import WorkerEngines
from dagrl.run.loops.grpo import begin_policy
from dagrl.run.loops.policy_update import (
    begin_logprobs,
    begin_update,
    calibrate_on_prompts,
    end_logprobs,
    logprob_batch,
    split_minibatches,
    whole_rows,
)
from dagrl.run.loops.sft import train_sft
from dagrl.run.plans import PhasePlan, grpo_plans, logprob_phases
from dagrl.run.session import LastStep, Session
from dagrl.run.start import run_session
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.rollouts import read_rollouts, rollout_files

Row = Mapping[str, Any]

GENERATE, TRAIN_STEP = "generate", "train_step"

KEEP = "keep_columns"  # method of train workers

TRAINED = "trained_tokens"  # metric

OF_GENERATION = frozenset({GENERATE, "refit"})


def sample_phases(config: Config) -> tuple[str, ...]:
    """Returns the phases of a step on samples that can be executed alone. Requests of agents are not recorded."""
    return (*(() if config.environment.agent is not None else (GENERATE,)), *logprob_phases(config), TRAIN_STEP)


@dataclass(frozen=True)
class Recorded:
    """The rollouts of the run in `directory`, and the `phases` of step `last` that are executed again.

    `made` gets the step's samples as generation makes them now.
    """

    directory: Path
    last: LastStep
    phases: Collection[str]
    made: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Returns the samples of a step. Raises ConfigError if the run has not kept them."""
        found = rollout_files(self.directory / "rollouts")
        if step not in found:
            raise ConfigError(
                f"{self.directory / 'rollouts'} has no samples of step {step}, on which training from the checkpoint on "
                "depends. Keep them (logger.rollouts_max_bytes), or choose another step"
            )
        return read_rollouts(found[step])


def run_recorded(config: Config, recorded: Recorded) -> None:
    """Trains on recorded samples from the start or the checkpoint, and executes the phases of the last step again."""
    last, phases = recorded.last.number, recorded.phases
    with run_session(config, partial(_plans, phases=phases), recorded.last) as session:
        if session.step < session.config.sft.max_num_steps:
            train_sft(session)
        _start_policy(session)
        rows = recorded.rows(last)
        regeneration = Regeneration(session, rows) if GENERATE in phases else None
        while session.step + 1 < last:
            if regeneration is not None:
                regeneration.generate(session.step)
            _train_step(session, recorded.rows(session.step + 1), known=True)
        if regeneration is not None:
            regeneration.generate(session.step)
            recorded.made.extend(regeneration.rows())
        if TRAIN_STEP in phases:
            _train_step(session, rows, known=not set(phases) & set(logprob_phases(config)))
        else:
            _score(session, rows, [name for name in logprob_phases(config) if name in phases])


def _plans(config: Config, phases: Collection[str]) -> list[PhasePlan]:
    """The phases of the run, without generation if it is not executed."""
    left_out = frozenset[str]() if GENERATE in phases else OF_GENERATION
    return [plan for plan in grpo_plans(config) if plan.name not in left_out]


def _start_policy(session: Session) -> None:
    """As at the start of a run, but generation gets weights only when it makes something with them."""
    if "grpo_sampler" not in session.checkpoints.state.counters:
        begin_policy(session)
    calibrate_on_prompts(session.config, session.replays, session.inputs.prompts)
    session.replays.close_step(tokens=0)


def _train_step(session: Session, rows: Sequence[Row], *, known: bool) -> None:
    """One step on recorded samples. Their log-probabilities are `known` from the records, or computed."""
    config, step = session.config, session.step + 1
    groups = scored_groups(config, rows)
    columns = kept_batch(config, groups, rows, step) if known and KEEP in session.train.role.methods else None
    if columns is not None:
        session.replays.hold("train", keep_generation_weights=True)
        session.train.call(KEEP, columns, deadline=config.timeouts.replay)
    _finish(session, begin_update(session, groups, step, known=columns is not None).result()[0])


def _score(session: Session, rows: Sequence[Row], names: Sequence[str]) -> None:
    """The log-probability phases `names` of a step, which the train workers keep, and nothing else of it."""
    config, replays, step = session.config, session.replays, session.step + 1
    groups = scored_groups(config, rows)
    batch = scored_batch(config, groups, step)
    begin_logprobs(config, replays, step)
    for name in names:
        shards = whole_rows(config, split_minibatches(config, batch))
        replays.replay(name, logprob_batch(batch, step), rows=shards)
    end_logprobs(config, replays, step)
    log = session.recorder.rollouts
    if log is not None and names:
        log.keep(groups, batch, step).write()
    _finish(session, {TRAINED: float(batch["lengths"].sum())})


def _finish(session: Session, metrics: dict[str, float]) -> None:
    config, step = session.config, session.step + 1
    metrics |= session.replays.close_step(tokens=int(metrics[TRAINED]))
    position, total = step - config.sft.max_num_steps, config.grpo.max_num_steps
    session.finish_step(algorithm_name(config), position, total, metrics, TrainState(step))


def scored_groups(config: Config, rows: Sequence[Row]) -> list[ScoredGroup]:
    """Returns the groups of a batch from its rollouts."""
    size = config.grpo.num_generations_per_prompt
    return [_scored_group(config, rows[start : start + size]) for start in range(0, len(rows), size)]


def _scored_group(config: Config, rows: Sequence[Row]) -> ScoredGroup:
    samples = [Sample(_prompt(row), _episode(row), row["completion"]) for row in rows]
    group = RolloutGroup(rows[0]["group"], 0, [sample.completion for sample in samples])
    answered = np.array([row["dropped"] != NO_REWARD for row in rows], np.bool_)
    values = np.array([row["reward"] for row in rows], np.float32)
    return scored_group(config, group, samples, Rewards(values, answered))


def _prompt(row: Row) -> Prompt:
    tokens = np.array(row["prompt_tokens"], np.int64)
    return Prompt(row["prompt"], tokens, row["reference"], row["source"], task=row["task"])


def _episode(row: Row, end: int | None = None) -> Episode:
    """The sequence of a rollout, up to token `end`."""
    columns = {name: row[name][:end] for name in TOKEN_FIELDS}
    return Episode(_prompt(row), 0, len(row["tokens"]), **columns, finish_reason=row["finish_reason"])


def kept_batch(config: Config, groups: Sequence[ScoredGroup], rows: Sequence[Row], step: int) -> Batch | None:
    """Returns the recorded log-probabilities as columns for the train workers; None if the loss lacks one."""
    columns = [name for name in KEPT if all(row[name] is not None for row in rows)]
    if any(KEPT[name] in algorithm_of(config).columns and name not in columns for name in KEPT):
        return None
    lengths = np.array([len(row["prompt_tokens"]) + len(row["tokens"]) for row in rows], np.int64)
    batch = Batch({"lengths": lengths, "row_ids": row_ids(config, sample_keys(groups))}, {"step": step})
    for name in columns:
        table = np.zeros((len(rows), int(lengths.max())), np.float32)
        for place, row in enumerate(rows):
            table[place, len(row["prompt_tokens"]) : lengths[place]] = row[name]
        batch = batch.with_fields(**{KEPT[name]: table})
    return batch


@dataclass(frozen=True)
class Turn:
    """Tokens `start` to `end` of a rollout, which the policy made in one request; those up to `known` by one version."""

    start: int
    end: int
    known: int


def turns_of(row: Row) -> list[Turn]:
    """Returns the turns of the policy in a rollout."""
    spans = [(start, end) for start, end in _episode(row).spans() if row["sampled"][start : start + 1] == [True]]
    made = row["versions"]
    return [Turn(start, end, next((at for at in range(start, end) if made[at] != made[start]), end)) for start, end in spans]


class Regeneration:
    """Generates the turns of a step's samples again, each with the weights of the version that began it.

    What a request made after a weight update in flight depends on its state at that moment, and stays as recorded.
    """

    def __init__(self, session: Session, rows: Sequence[Row]) -> None:
        self._session, self._recorded = session, rows
        self._left = [(place, turn) for place, row in enumerate(rows) for turn in turns_of(row)]
        self._made: dict[tuple[int, int], Episode] = {}  # by sample and start of the turn

    def generate(self, version: int) -> None:
        """Makes the turns that began with `version`, whose weights the train workers have."""
        session = self._session
        now = [(place, turn) for place, turn in self._left if self._recorded[place]["versions"][turn.start] == version]
        if not now:
            return
        assert session.generation is not None
        session.replays.replay("refit", version)
        engines = WorkerEngines(session.generation, session.replays, session.config.timeouts.replay)
        rollouts = Rollouts(session.config, engines, session.inputs.tokenizer)
        episodes = [self._begun(self._recorded[place], turn) for place, turn in now]
        rollouts.start(*[RolloutGroup(number, -1, [episode]) for number, episode in enumerate(episodes)])
        while rollouts.busy:
            rollouts.advance()
            session.stop.check()
        rollouts.settle()
        self._made |= {(place, turn.start): episode for (place, turn), episode in zip(now, episodes, strict=True)}

    def _begun(self, row: Row, turn: Turn) -> Episode:
        """The request of a turn as it was sent; it ends where another version went on."""
        config, generation = self._session.config, generation_config(self._session.config)
        seed = request_seeds(config.seed, row["group"], config.grpo.num_generations_per_prompt)[row["place"]]
        whole = turn.known == turn.end and generation.forced_lengths is None
        limit = generation.max_new_tokens if whole else turn.known - turn.start
        return replace(_episode(row, turn.start), seed=seed, max_new_tokens=limit, turn_start=turn.start, finish_reason="")

    def rows(self) -> list[dict[str, Any]]:
        """Returns the samples with what was generated in place of the recorded tokens."""
        return [self._row(place, row) for place, row in enumerate(self._recorded)]

    def _row(self, place: int, row: Row) -> dict[str, Any]:
        found = dict(row)
        for turn in reversed(turns_of(row)):  # from the end, as lengths may differ
            episode = self._made[place, turn.start]
            for name in TOKEN_FIELDS:
                made = getattr(episode, name)[turn.start :].tolist()
                found[name] = [*found[name][: turn.start], *made, *found[name][turn.known :]]
            if turn.known == turn.end == len(row["tokens"]) and not self._session.config.environment.enabled:
                found["finish_reason"] = episode.finish_reason
        return found


def first_version(rows: Sequence[Row]) -> int:
    """Returns the oldest policy version that began a turn of these rollouts."""
    return min((int(row["versions"][turn.start]) for row in rows for turn in turns_of(row)), default=0)


def made_by_later_versions(rows: Sequence[Row]) -> int:
    """Returns how many tokens weight updates in flight keep from being generated again."""
    return sum(turn.end - turn.known for row in rows for turn in turns_of(row))
