"""Trains the policy on a batch of scored groups: log-probabilities, values of a critic, optimizer steps.

    update = trainer.begin(groups, step)     # returns with the optimizer steps in flight
    ...                                      # the driver prepares the next step
    metrics, ended = update.result()

The train workers keep log-probabilities for the step (`dagrl.workers.train.kept_logprobs`); the driver only says which rows
to compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, TRAIN
from dagrl.config.settings import rows_per_sample, rows_together
from dagrl.errors import ConfigError
from dagrl.rl.advantages import explained_variance, rewards_at_end
from dagrl.rl.algorithm import Algorithm, planned_algorithm, token_advantages_of
from dagrl.rl.rollout.batches import scored_batch
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.loops.optimizer_step import ShardRows, collect_batch, submit_batch
from dagrl.run.plans import KEEP, column_phases
from dagrl.run.replays import Replays
from dagrl.run.rollout_log import KeptSamples, RolloutLog
from dagrl.run.session import Session
from dagrl.run.stop import StopSignal
from dagrl.runtime.phase import Phase
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Array, Batch
from dagrl.runtime.split import split_rows
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import COUNTS, MASKED_MINIBATCHES, is_measured, join_optimizer_steps

logger = logging.getLogger(__name__)

Learned: TypeAlias = tuple[dict[str, float], float]
"""The metrics of an update, and when its last optimizer step had ended (`time.perf_counter`)."""

CRITIC_VALUES, CRITIC_STEP = "critic_values", "critic_step"
CRITIC_PREFIX = "critic/"


@contextmanager
def open_trainer(session: Session) -> Iterator[PolicyTrainer]:
    """Opens a trainer with a thread for `submit`. If the loop fails, the thread fails by itself at its next replay."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="train")
    try:
        yield PolicyTrainer(
            config=session.config,
            plan=session.plan,
            replays=session.replays,
            train=session.train,
            stop=session.stop,
            log=session.recorder.rollouts,
            thread=thread,
            media=session.config.data.images.enabled,
        )
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class PolicyTrainer:
    """See the module's docstring."""

    config: Config
    plan: RunPlan
    replays: Replays
    train: WorkerGroup
    stop: StopSignal
    log: RolloutLog | None
    thread: Executor
    media: bool

    def start(self) -> None:
        """Prepares the train workers for the first step of all: the current weights are the reference policy."""
        self.replays.hold(TRAIN, keep_generation_weights=True)
        if self.plan.reference == TRAIN:
            self.train.call("snapshot_reference", deadline=self.config.timeouts.replay)
        self.train.call("reset_optimizer", deadline=self.config.timeouts.replay)

    def submit(self, groups: Sequence[ScoredGroup], step: int) -> Future[Learned]:
        """Runs step `step` on `groups` in a thread, while the caller goes on with generation."""
        return self.thread.submit(lambda: self.begin(groups, step).result())

    def begin(self, groups: Sequence[ScoredGroup], step: int) -> PolicyUpdate:
        """Computes log-probabilities, and starts the optimizer steps of step `step` on `groups`."""
        batch = scored_batch(planned_algorithm(self.plan), groups, media=self.media)
        splits = split_minibatches(self.config, batch)
        critic = None
        if self.plan.critic and not self.replays.takes_turns(CRITIC):
            critic = self._critic_step(batch)  # computes values during the next lines
        self.compute_columns(batch, splits, step)
        if self.plan.critic and critic is None:
            critic = self._critic_step(batch)  # its steps follow its values, without a turn in between
        if critic is not None:
            batch = critic.judged_batch()
        self.stop.check()  # the last point at which the weights are those of the last finished step
        if critic is not None:
            critic.start(step)
        warms_up = critic is not None and step - self.config.sft.max_num_steps <= self.config.critic.warmup_steps
        steps = None if warms_up else self.submit_steps(batch, step, splits)
        return PolicyUpdate(self, batch, step, steps, critic, self.log.keep(groups, batch, step) if self.log else None)

    def compute_columns(self, batch: Batch, splits: Sequence[ShardRows], step: int) -> None:
        """Computes the algorithm's columns for the rows of `batch`, which step `step` trains on. `splits`: see
        `split_minibatches`.

        Models on workers of their own work at the same time as the train workers. With
        `policy.offload_optimizer_for_logprob` the optimizer's state is on the host during it.
        """
        replays, phases, batch = self.replays, column_phases(self.config, self.plan), batch.with_scalars(step=step)
        size = self.config.policy.train_global_batch_size * rows_per_sample(self.config)
        shards = [  # the rows of the whole batch that each has
            np.concatenate([number * size + rows for number, rows in enumerate(shard)])
            for shard in zip(*splits, strict=True)
        ]
        offloads = self.config.policy.offload_optimizer_for_logprob and phases.train
        if offloads:
            replays.replay("logprob_inference_prep", step)
        apart = {name: replays.submit(name, input_of(replays.phases[name], batch)) for name in phases.apart}
        there = [(name, replays.submit(name, input_of(replays.phases[name], batch), shards)) for name in phases.train]
        for name, replay in there:
            replays.collect(name, replay)
        if apart:
            columns = dict[str, Array]()
            for name, replay in apart.items():  # through the driver to the train workers
                columns |= returned_columns(name, phases.apart[name], replays.collect(name, replay)[0])
            kept = {"lengths": batch["lengths"], "row_ids": batch["row_ids"], **columns}
            replays.replay(KEEP, Batch(kept, {"step": step}), rows=shards)
        if offloads:
            replays.replay("training_prep", step)

    def submit_steps(self, batch: Batch, step: int, splits: Sequence[ShardRows]) -> list[Replay | None]:
        """Starts one optimizer step for the rows of each `policy.train_global_batch_size` samples.

        A minibatch without a token in the loss is None; `grpo.overlong_filtering` can leave one. `splits` are the rows of
        each shard, by minibatch.
        """
        batch = batch.with_scalars(step=step)
        return [self.submit_step(batch.share(number, len(splits)), rows) for number, rows in enumerate(splits)]

    def submit_step(self, minibatch: Batch, shard_rows: ShardRows) -> Replay | None:
        """Starts an optimizer step, if the minibatch has a token in the loss."""
        if not minibatch["loss_mask"].any():
            return None
        return submit_batch(self.replays, "train_step", minibatch, shard_rows)

    def _critic_step(self, batch: Batch) -> CriticStep:
        return CriticStep(self.config, planned_algorithm(self.plan), self.replays, batch)


@dataclass(frozen=True)
class PolicyUpdate:
    """Optimizer steps in flight: one for each minibatch with a token in the loss; `steps` is None if the critic warms up."""

    trainer: PolicyTrainer
    batch: Batch
    step: int
    steps: Sequence[Replay | None] | None
    critic: CriticStep | None
    kept: KeptSamples | None  # in `rollouts/`

    def result(self) -> Learned:
        """Waits for the optimizer steps."""
        metrics = {} if self.steps is None else collect_steps(self.trainer.replays, self.steps, self.step)
        if self.critic is not None:
            metrics |= self.critic.finish(self.step)
        if self.kept is not None:
            self.kept.write()
        return metrics | {"trained_tokens": float(self.batch["lengths"].sum())}, time.perf_counter()


def split_minibatches(config: Config, batch: Batch) -> list[ShardRows]:
    """Returns the rows of each minibatch that each train shard gets: the shard that computed their log-probabilities."""
    size = config.policy.train_global_batch_size * rows_per_sample(config)
    lengths = batch["lengths"].astype(np.int64)
    together = rows_together(config, config.grpo.num_generations_per_prompt * rows_per_sample(config))
    shards = config.policy.train_layout.dp
    return [split_rows(lengths[start : start + size], shards, together) for start in range(0, batch.rows, size)]


def input_of(phase: Phase, batch: Batch) -> Batch:
    """Returns the fields of `batch` that the phase takes, with its step. Raises ConfigError for one that it lacks."""
    wanted = {"lengths", *(phase.inputs or ())}
    unknown = sorted(wanted - batch.fields.keys())
    if unknown:
        raise ConfigError(
            f"phase {phase.name!r} takes the field {unknown[0]!r}, which batches do not have; choose among "
            f"{', '.join(batch.fields)}"
        )
    return Batch({name: array for name, array in batch.fields.items() if name in wanted}, {"step": batch.scalars["step"]})


def returned_columns(phase: str, columns: Sequence[str], result: object) -> dict[str, Array]:
    """Returns the columns that a phase returned. Raises ConfigError if it gave no batch that has them."""
    fields = result.fields if isinstance(result, Batch) else {}
    missing = [name for name in columns if name not in fields]
    if missing:
        given = f"a batch of {', '.join(fields)}" if fields else f"a {type(result).__name__}"
        raise ConfigError(
            f"phase {phase} returned {given}, but the algorithm's column {missing[0]!r} comes from it; return a Batch with "
            "a float32 field [rows, tokens] of that name"
        )
    return {name: np.asarray(fields[name], np.float32) for name in columns}


def collect_steps(replays: Replays, steps: Sequence[Replay | None], step: int) -> dict[str, float]:
    """Waits for what `submit_steps` started; returns the metrics of all."""
    parts = [collect_batch(replays, "train_step", replay, step=step) for replay in steps if replay is not None]
    masked = len(steps) - len(parts)
    if masked:
        logger.warning("%d of %d minibatches have no token in the loss: skipped", masked, len(steps))
    return {**(join_optimizer_steps(parts).flat() if parts else {}), MASKED_MINIBATCHES: float(masked)}


class CriticStep:
    """The critic in one step on `batch`, whose `advantages` are the rewards of its rows until `judged_batch`.

    critic = CriticStep(..., batch)      # starts to compute values, while log-probabilities are computed
    batch = critic.judged_batch()        # with an advantage for each token
    critic.start(step)                   # optimizer steps, while the policy takes its own
    metrics |= critic.finish(step)
    """

    def __init__(self, config: Config, algorithm: Algorithm, replays: Replays, batch: Batch) -> None:
        self._config, self._algorithm, self._replays, self._batch = config, algorithm, replays, batch
        self._metrics: dict[str, float] = {}
        rows = Batch({name: batch[name] for name in ("tokens", "lengths")})
        self._values: Replay = replays.submit(CRITIC_VALUES, rows)
        self._steps: list[Replay] = []

    def judged_batch(self) -> Batch:
        """Waits for the values. Returns the batch with the algorithm's advantages in place of rewards."""
        batch = self._batch
        values = self._replays.collect(CRITIC_VALUES, self._values)[0]["values"] * batch["loss_mask"]
        inside = batch["loss_mask"] > 0
        rewards = batch["advantages"][np.arange(batch.rows), inside.argmax(axis=1)]  # on every token of a row
        rewards = rewards_at_end(rewards, inside)
        advantages, returns = token_advantages_of(self._algorithm, rewards, values, batch["loss_mask"])
        self._metrics[CRITIC_PREFIX + "explained_variance"] = explained_variance(returns, values, inside)
        self._metrics[CRITIC_PREFIX + "return_mean"] = float(returns[inside].mean()) if inside.any() else 0.0
        names = ("tokens", "lengths", "loss_mask")
        learned = {"values": values.astype(np.float32), "returns": returns.astype(np.float32)}
        self._batch = Batch({**{name: batch[name] for name in names}, **learned})
        return batch.with_fields(advantages=advantages.astype(np.float32))

    def start(self, step: int) -> None:
        """Starts the critic's optimizer steps on the batch."""
        size = self._config.policy.train_global_batch_size
        for start in range(0, self._batch.rows, size):
            minibatch = self._batch.select(range(start, start + size)).with_scalars(step=step)
            if minibatch["loss_mask"].any():
                self._steps.append(submit_batch(self._replays, CRITIC_STEP, minibatch))

    def finish(self, step: int) -> dict[str, float]:
        """Waits for the optimizer steps, and returns the critic's metrics."""
        parts = [collect_batch(self._replays, CRITIC_STEP, replay, step=step) for replay in self._steps]
        metrics = join_optimizer_steps(parts).flat() if parts else {}
        renamed = {
            CRITIC_PREFIX + name: value for name, value in metrics.items() if name not in COUNTS and not is_measured(name)
        }
        return renamed | self._metrics
