"""The training batch of scored groups: a row a sample, with its advantage on every token that the policy made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagrl.advantages import group_advantages
from dagrl.config import Config
from dagrl.loops.episodes import Sample, token_rows
from dagrl.loops.logprobs import Columns, Key
from dagrl.loops.scoring import ScoredGroup
from dagrl.rewards import shuffled
from dagrl.shapes import Batch


def scored_batch(config: Config, groups: Sequence[ScoredGroup], step: int) -> Batch:
    """All samples of `groups`, in the order of `sample_keys`, for optimizer step `step`; without train log-probabilities."""
    samples = [sample for group in groups for sample in group.samples]
    counted = np.concatenate([group.counted for group in groups])
    if config.grpo.overlong_filtering:
        counted &= [sample.completion.finish_reason != "length" for sample in samples]
    return train_batch(samples, advantages(config, groups, step), counted)


def sample_keys(groups: Sequence[ScoredGroup]) -> list[Key]:
    """Of every sample, group by group."""
    return [(group.group.number, place) for group in groups for place in range(len(group.samples))]


def advantages(config: Config, groups: Sequence[ScoredGroup], step: int) -> npt.NDArray[np.float32]:
    """Advantage of each sample, [samples] float32. Those of a group depend on no other, unless `reward.shuffle` is on."""
    values, counted = (np.concatenate([getattr(group, name) for group in groups]) for name in ("values", "counted"))
    if config.reward.shuffle:
        values[counted] = shuffled(values[counted], config.seed, step)
    table = group_advantages(
        values.reshape(len(groups), -1),
        leave_one_out=config.grpo.use_leave_one_out_baseline,
        normalize=config.grpo.normalize_rewards,
        counted=counted.reshape(len(groups), -1),
    )
    return table.reshape(-1).astype(np.float32)


def train_batch(
    samples: Sequence[Sample], advantage: npt.NDArray[np.float32], counted: npt.NDArray[np.bool_] | None = None
) -> Batch:
    """Samples as rows, token aligned: the loss mask and the advantages are on the tokens that the policy made alone.

    Samples that are not `counted` [samples] have no token in the loss.
    """
    rows = token_rows([sample.completion for sample in samples])
    shape = rows["tokens"].shape
    mask, generation_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt), len(sample)
        generation_logprobs[row, start:end] = sample.completion.logprobs
        if counted is None or counted[row]:
            mask[row, start:end] = sample.completion.sampled
    return rows.with_fields(
        loss_mask=mask,
        advantages=mask * advantage[:, None],
        generation_logprobs=mask * generation_logprobs,
    )


def with_columns(batch: Batch, columns: Columns) -> Batch:
    """The batch with the policy's and the reference's log-probabilities of the tokens in the loss."""
    fields = {"prev_logprobs": columns["logprobs"], "reference_logprobs": columns["reference_logprobs"]}
    return batch.with_fields(**{name: values * batch["loss_mask"] for name, values in fields.items()})
