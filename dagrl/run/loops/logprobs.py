"""Log-probabilities of a step's samples, under the policy and the reference policy.

The train workers keep them for the step (`dagrl.workers.train.kept_logprobs`); the driver only says which rows to compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.config.settings import rows_per_sample, rows_together, uses_teacher
from dagrl.rl.routed_experts import ROUTED_EXPERTS
from dagrl.run.plans import logprob_phases
from dagrl.run.replays import Replays
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows

TEACHER_LOGPROBS = "teacher_logprobs"
"""The phase of a teacher on workers of its own. Its result goes through the driver to the train workers."""

ShardRows = Sequence[npt.NDArray[np.intp]]
"""The rows of each shard."""


def split_minibatches(config: Config, batch: Batch) -> list[ShardRows] | None:
    """Returns the rows of each minibatch that each train shard gets: the shard that computed their log-probabilities.

    None with `grpo.overlap_logprobs`: every shard then holds the log-probabilities of all rows.
    """
    if config.grpo.overlap_logprobs:
        return None
    size = config.policy.train_global_batch_size * rows_per_sample(config)
    lengths = batch["lengths"].astype(np.int64)
    shards, together = config.policy.megatron_cfg.layout.dp, rows_together(config)
    return [split_rows(lengths[start : start + size], shards, together) for start in range(0, batch.rows, size)]


def compute_logprobs(
    config: Config, replays: Replays, batch: Batch, splits: Sequence[ShardRows] | None, known: Sequence[bool], step: int
) -> None:
    """Computes the log-probabilities that step `step` needs of the rows of `batch`, except for those that are `known`.

    `splits` comes from `split_minibatches`. With `policy.offload_optimizer_for_logprob` the optimizer's state is on the host
    from the first log-probabilities of a step, early ones included, until this returns.
    """
    missing = [row for row, done in enumerate(known) if not done]
    if len(missing) == batch.rows:
        begin_logprobs(config, replays, step)
    if missing:
        rows = logprob_batch(batch if len(missing) == batch.rows else batch.select(missing), step)
        shards = whole_rows(config, splits)
        teacher = _submit_teacher(config, replays, rows)
        for name in logprob_phases(config):
            replays.replay(name, rows, rows=shards)
        for name, replay in teacher.items():
            keep_teacher(replays, rows, replays.collect(name, replay)[0], shards)
    end_logprobs(config, replays, step)


def _submit_teacher(config: Config, replays: Replays, rows: Batch) -> dict[str, Replay]:
    """Starts the log-probabilities of a teacher on workers of its own, if there is one; returns the replay by phase."""
    if not uses_teacher(config):
        return {}
    return {TEACHER_LOGPROBS: replays.submit(TEACHER_LOGPROBS, Batch({name: rows[name] for name in ("tokens", "lengths")}))}


def keep_teacher(replays: Replays, rows: Batch, found: Batch, shards: ShardRows | None = None) -> None:
    """Gives the teacher's log-probabilities of `rows`, the result `found` of its phase, to the train workers."""
    fields = {"lengths": rows["lengths"], "row_ids": rows["row_ids"], "reference_logprobs": found["logprobs"]}
    replays.replay("keep_reference_logprobs", Batch(fields, rows.scalars), rows=shards)


def whole_rows(config: Config, splits: Sequence[ShardRows] | None) -> ShardRows | None:
    """Returns the rows of the whole batch that each shard gets, from those of its minibatches."""
    if splits is None:
        return None
    size = config.policy.train_global_batch_size * rows_per_sample(config)
    return [
        np.concatenate([number * size + rows for number, rows in enumerate(shard)]) for shard in zip(*splits, strict=True)
    ]


def logprob_batch(batch: Batch, step: int) -> Batch:
    """The fields of `batch` that the log-probability phases read."""
    fields = {name: batch[name] for name in ("tokens", "lengths", "row_ids", ROUTED_EXPERTS) if name in batch.fields}
    return Batch(fields, {"step": step})


def begin_logprobs(config: Config, replays: Replays, step: int) -> None:
    """Call before the first log-probabilities of a step."""
    if config.policy.offload_optimizer_for_logprob and logprob_phases(config):
        replays.replay("logprob_inference_prep", step)


def end_logprobs(config: Config, replays: Replays, step: int) -> None:
    """Call after the last log-probabilities of a step."""
    if config.policy.offload_optimizer_for_logprob and logprob_phases(config):
        replays.replay("training_prep", step)


def submit_logprobs(config: Config, replays: Replays, batch: Batch, shards: ShardRows | None = None) -> Mapping[str, Replay]:
    """Starts the log-probability phases on `batch` (see `logprob_batch`); returns their replays by phase."""
    own = {name: replays.submit(name, batch, shards) for name in logprob_phases(config)}
    return own | _submit_teacher(config, replays, batch)


def collect_logprobs(replays: Replays, batch: Batch, started: Mapping[str, Replay], shards: ShardRows | None = None) -> None:
    """Waits for the replays that `submit_logprobs` started on `batch`."""
    for name, replay in started.items():
        found = replays.collect(name, replay)[0]
        if name == TEACHER_LOGPROBS:
            keep_teacher(replays, batch, found, shards)
