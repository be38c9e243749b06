"""Replays a training or evaluation phase on a global batch, and joins the metrics of its shards."""

import logging
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagrl.run.replays import Replays
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import GRAD_NORM, SKIPPED_STEPS, StepMetrics, merge_step_metrics

logger = logging.getLogger(__name__)

ShardRows = Sequence[npt.NDArray[np.intp]]  # the rows of each shard


def replay_batch(
    replays: Replays, phase: str, batch: Batch, *, step: int, shard_rows: ShardRows | None = None
) -> StepMetrics:
    """Replays `phases.<phase>` on `batch` in step `step` and returns the metrics over all shards.

    `shard_rows` are the rows of each shard, if the caller decides.
    """
    return collect_batch(replays, phase, submit_batch(replays, phase, batch, shard_rows), step=step)


def submit_batch(replays: Replays, phase: str, batch: Batch, shard_rows: ShardRows | None = None) -> Replay:
    """Starts what `replay_batch` does."""
    return replays.submit(phase, with_counts(batch), shard_rows)


def with_counts(batch: Batch) -> Batch:
    """Adds what losses are divided by: tokens in the loss, and rows with at least one."""
    tokens = batch["loss_mask"].sum(axis=1, dtype="float64")
    sequences = float((tokens > 0).sum())
    return batch.with_scalars(global_valid_tokens=float(tokens.sum()), global_valid_sequences=sequences)


def collect_batch(replays: Replays, phase: str, replay: Replay, *, step: int) -> StepMetrics:
    """Returns the metrics of a replay that `submit_batch` started.

    Warns of a skipped step: the workers' own warnings stay in Ray's logs. They count skipped steps over the run.
    """
    metrics = merge_step_metrics(replays.collect(phase, replay)[0])
    norm, skipped = metrics.shared.get(GRAD_NORM), int(metrics.shared.get(SKIPPED_STEPS, 0))
    if norm is not None and not (math.isfinite(norm) and norm > 0):
        what = "optimizer step skipped, weights unchanged"
        logger.warning("step %d: gradient norm is %s: %s (%d so far)", step, norm, what, skipped)
    return metrics
