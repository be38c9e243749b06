"""Log-probabilities of a step's samples, under the policy and the reference policy.

The train workers keep them for the step (`dagrl.workers.train.kept_logprobs`); the driver only says which rows to compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.config.settings import rows_per_sample, rows_together, uses_teacher
from dagrl.rl.routed_experts import ROUTED_EXPERTS
from dagrl.run.plans import logprob_phases
from dagrl.run.replays import Replays
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows

ShardRows = Sequence[npt.NDArray[np.intp]]
"""The rows of each shard."""


def split_minibatches(config: Config, batch: Batch) -> list[ShardRows]:
    """Returns the rows of each minibatch that each train shard gets: the shard that computed their log-probabilities."""
    size = config.policy.train_global_batch_size * rows_per_sample(config)
    lengths = batch["lengths"].astype(np.int64)
    shards, together = config.policy.megatron_cfg.layout.dp, rows_together(config)
    return [split_rows(lengths[start : start + size], shards, together) for start in range(0, batch.rows, size)]


def compute_logprobs(config: Config, replays: Replays, batch: Batch, splits: Sequence[ShardRows], step: int) -> None:
    """Computes the log-probabilities that step `step` needs of the rows of `batch`. `splits`: see `split_minibatches`.

    With `policy.offload_optimizer_for_logprob` the optimizer's state is on the host meanwhile.
    """
    rows, shards = logprob_batch(batch, step), whole_rows(config, splits)
    begin_logprobs(config, replays, step)
    if not uses_teacher(config):
        teacher = None
    else:
        teacher = replays.submit("teacher_logprobs", Batch({name: rows[name] for name in ("tokens", "lengths")}))
    for name in logprob_phases(config):
        replays.replay(name, rows, rows=shards)
    if teacher is not None:
        found = replays.collect("teacher_logprobs", teacher)[0]  # through the driver to the train workers
        fields = {"lengths": rows["lengths"], "row_ids": rows["row_ids"], "reference_logprobs": found["logprobs"]}
        replays.replay("keep_reference_logprobs", Batch(fields, rows.scalars), rows=shards)
    end_logprobs(config, replays, step)


def whole_rows(config: Config, splits: Sequence[ShardRows]) -> ShardRows:
    """Returns the rows of the whole batch that each shard gets, from those of its minibatches."""
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
