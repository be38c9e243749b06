"""Log-probabilities of a step's samples, under the policy and the reference policy.

The train workers keep them for the step (`dagrl.rl.kept_logprobs`); the driver only says which rows to compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.run.plans import logprob_phases
from dagrl.run.replays import Replays
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows

ShardRows = Sequence[npt.NDArray[np.intp]]
"""The rows of each shard."""


def split_minibatches(config: Config, batch: Batch) -> list[ShardRows] | None:
    """Returns the rows of each minibatch that each train shard gets: the shard that computed their log-probabilities.

    None with `grpo.overlap_logprobs`: every shard then holds the log-probabilities of all rows.
    """
    if config.grpo.overlap_logprobs:
        return None
    size, lengths = config.policy.train_global_batch_size, batch["lengths"].astype(np.int64)
    shards = config.policy.megatron_cfg.layout.dp
    return [split_rows(lengths[start : start + size], shards) for start in range(0, batch.rows, size)]


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
        rows = logprob_batch(batch.select(missing), step)
        for name in logprob_phases(config):
            replays.replay(name, rows, rows=_whole(config, splits))
    end_logprobs(config, replays, step)


def _whole(config: Config, splits: Sequence[ShardRows] | None) -> ShardRows | None:
    """The rows of the whole batch that each shard gets, from those of its minibatches."""
    if splits is None:
        return None
    size = config.policy.train_global_batch_size
    return [
        np.concatenate([number * size + rows for number, rows in enumerate(shard)]) for shard in zip(*splits, strict=True)
    ]


def logprob_batch(batch: Batch, step: int) -> Batch:
    """The fields of `batch` that the log-probability phases read."""
    fields = {name: batch[name] for name in ("tokens", "lengths", "row_ids")}
    return Batch(fields, {"step": step})


def begin_logprobs(config: Config, replays: Replays, step: int) -> None:
    """Call before the first log-probabilities of a step."""
    if config.policy.offload_optimizer_for_logprob and logprob_phases(config):
        replays.replay("logprob_inference_prep", step)


def end_logprobs(config: Config, replays: Replays, step: int) -> None:
    """Call after the last log-probabilities of a step."""
    if config.policy.offload_optimizer_for_logprob and logprob_phases(config):
        replays.replay("training_prep", step)


def submit_logprobs(config: Config, replays: Replays, batch: Batch) -> Mapping[str, Replay]:
    """Starts the log-probability phases on `batch` (see `logprob_batch`); returns their replays by phase."""
    return {name: replays.submit(name, batch) for name in logprob_phases(config)}
