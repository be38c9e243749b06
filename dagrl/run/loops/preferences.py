"""The loop over preferences: draw pairs of answers, compare them, replay one optimizer step. Read it from top to bottom.

`dagrl.rl.preferences` says why a step computes the answers' log-probabilities first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from dagrl.config.roles import TRAIN
from dagrl.config.settings import algorithm_name, rows_together
from dagrl.data import open_sampler
from dagrl.data.tokenization import Preference, collate_pairs, labels_of
from dagrl.rl.preferences import PairLosses, PreferenceAlgorithm, Sums, pair_losses, sum_phases
from dagrl.run.loops.optimizer_step import ShardRows, replay_batch
from dagrl.run.replays import Replays
from dagrl.run.session import Session, Stage
from dagrl.run.stop import given_up
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from dagrl.telemetry.metrics import VALIDATION

SAMPLER = "preference_sampler"


def train_preferences(session: Session) -> None:
    """Runs the steps that are left."""
    config, state = session.config, session.checkpoints.state
    stage = Stage.of(algorithm_name(config), config.preference)
    train, validation = session.inputs.preferences, session.inputs.validation_preferences
    sampler = open_sampler(train, config.data)
    if SAMPLER in state.counters:
        sampler.restore(state.counters[SAMPLER])
    elif session.plan.reference == TRAIN:
        session.train.call("snapshot_reference", deadline=config.timeouts.replay)
    comparison = Comparison(cast(PreferenceAlgorithm, session.plan.algorithm), session.replays)
    session.begin(stage)
    if session.step == 0 and stage.val_at_start and validation:
        session.record_initial_validation(stage, evaluate(session, comparison, validation, may_stop=True))
        session.replays.close_step(tokens=0)  # not part of the first step
    while session.step < stage.last:
        step = session.step + 1
        pairs = [train[index] for index in sampler.take(config.policy.train_global_batch_size)]
        batch = collate_pairs(pairs, media=config.data.images.enabled)
        metrics = comparison.learn(batch, labels_of(pairs), step)
        if validation and stage.validates(step):
            metrics |= evaluate(session, comparison, validation)
        metrics |= session.replays.close_step(tokens=int(batch["lengths"].sum()))
        session.finish_step(stage, step, metrics, {SAMPLER: sampler.state(), **session.reference_counter})


@dataclass(frozen=True)
class Comparison:
    """Compares the answers of pairs by an algorithm's loss."""

    algorithm: PreferenceAlgorithm
    replays: Replays

    def learn(self, batch: Batch, labels: Sums | None, step: int) -> dict[str, float]:
        """Takes one optimizer step on the pairs of `batch` (see `collate_pairs`). Returns its metrics."""
        losses = self.losses(batch, labels)
        weights = (losses.weights * batch.rows).astype(np.float32)  # the step averages over rows
        weighted, rows = batch.with_fields(answer_weights=weights), self._rows(batch)
        metrics = replay_batch(self.replays, "preference_step", weighted, step=step, shard_rows=rows)
        return {**metrics.flat(), **losses.metrics}

    def losses(self, batch: Batch, labels: Sums | None) -> PairLosses:
        """Returns the loss of the pairs of `batch` under the current weights."""
        rows = self._rows(batch)
        sums = [self.replays.replay(name, batch, rows)["sums"] for name in sum_phases(self.algorithm)]
        tokens = batch["loss_mask"].sum(axis=1).astype(np.int64)
        return pair_losses(self.algorithm, sums[0], tokens, sums[1] if len(sums) > 1 else None, labels)

    def _rows(self, batch: Batch) -> ShardRows:
        """Returns the rows of each shard."""
        config = self.algorithm.config
        return split_rows(batch["lengths"], config.policy.train_layout.dp, rows_together(config, 2))


def evaluate(
    session: Session, comparison: Comparison, validation: Sequence[Preference], *, may_stop: bool = False
) -> dict[str, float]:
    """Returns the mean metrics of held-out pairs.

    A stop request ends it: it then returns nothing. With `may_stop` it raises StopRequestedError instead; pass it only where
    every step taken is recorded.
    """
    session.recorder.progress.status("validating")
    size, totals = session.config.policy.train_global_batch_size, dict[str, float]()
    for start in range(0, len(validation), size):
        if session.stop.requested:
            return given_up(session.stop, may_stop)
        pairs = validation[start : start + size]
        batch = collate_pairs(pairs, media=session.config.data.images.enabled)
        for name, value in comparison.losses(batch, labels_of(pairs)).metrics.items():
            totals[name] = totals.get(name, 0.0) + value * len(pairs) / len(validation)
    return {VALIDATION + name: value for name, value in totals.items()}
