"""Training batches of scored groups: one row per sample, with its advantage on every token that the policy made."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.config.settings import bucket_widths, rows_per_sample
from dagrl.data.tokenization import Prompt
from dagrl.rl.algorithm import Algorithm, advantages_of
from dagrl.rl.rollout.episodes import Episode, Sample, token_rows
from dagrl.rl.rollout.scoring import ScoredGroup, samples_in
from dagrl.rl.routed_experts import NOTHING, ROUTED_EXPERTS, field_of
from dagrl.runtime.shapes import Array, Batch

NO_ROW = Episode(Prompt("", np.zeros(0, np.int64), "", ""), 0, 0)  # a row without tokens


def scored_batch(algorithm: Algorithm, groups: Sequence[ScoredGroup], *, media: bool = False) -> Batch:
    """Returns the rows of all samples, group by group. With `media`, also that field (`dagrl.data.media`)."""
    samples, config = samples_in(groups), algorithm.config
    valid = np.concatenate([group.valid for group in groups])
    if config.grpo.overlong_filtering:
        valid &= [sample.completion.finish_reason != "length" for sample in samples]
    widths = bucket_widths(config.policy)  # so that shards do not pad them
    values = advantages(algorithm, groups)
    batch = train_batch(samples, values, valid, rows_per_sample(config), media=media, widths=widths)
    experts = experts_field([sample.completion for sample in samples], config, batch.tokens)
    return batch.with_fields(row_ids=row_ids(config, groups), **experts)


def experts_field(episodes: Sequence[Episode], config: Config, width: int) -> dict[str, Array]:
    """Returns the field of the recorded experts of the episodes, one per row, if `policy.router_replay` is on.

    Those that the environment failed for before their first turn have none.
    """
    if not config.policy.router_replay:
        return {}
    records = [episode.experts if len(episode.tokens) else NOTHING for episode in episodes]
    return {ROUTED_EXPERTS: field_of(records, width)}


def row_ids(config: Config, groups: Sequence[ScoredGroup]) -> npt.NDArray[np.int64]:
    """Returns an id for each row of samples by which train workers find its log-probabilities. It is unique in a run."""
    rows, size = np.arange(rows_per_sample(config)), config.grpo.num_generations_per_prompt
    samples = [group.group.number * size + place for group in groups for place in range(len(group.samples))]
    return (np.array(samples, np.int64)[:, None] * len(rows) + rows).reshape(-1)


def advantages(algorithm: Algorithm, groups: Sequence[ScoredGroup]) -> npt.NDArray[np.float32]:
    """Returns the advantage of each sample, [samples] float32."""
    rewards, valid = (np.stack([getattr(group, name) for group in groups]) for name in ("values", "valid"))
    return advantages_of(algorithm, rewards, valid).reshape(-1).astype(np.float32)


def train_batch(
    samples: Sequence[Sample],
    advantage: npt.NDArray[np.float32],
    valid: npt.NDArray[np.bool_] | None = None,
    rows_per_sample: int = 1,
    *,
    media: bool = False,
    widths: Sequence[int] = (),
) -> Batch:
    """Returns samples as token-aligned rows. Only tokens that the policy made have a loss mask and an advantage.

    `widths`: see `token_rows`. Samples that are not `valid` [samples] have no token in the loss. A sample with fewer than
    `rows_per_sample` sequences has empty rows too.
    """
    episodes = [row for sample in samples for row in [*sample.rows, *[NO_ROW] * rows_per_sample][:rows_per_sample]]
    rows = token_rows(episodes, media=media, widths=widths)
    mask, generation_logprobs = (np.zeros(rows["tokens"].shape, np.float32) for _ in range(2))
    for row, episode in enumerate(episodes):
        if valid is None or valid[row // rows_per_sample]:
            completion = slice(len(episode.prompt.tokens), len(episode))
            mask[row, completion], generation_logprobs[row, completion] = episode.sampled, episode.logprobs
    return rows.with_fields(
        loss_mask=mask,
        advantages=mask * np.repeat(advantage, rows_per_sample)[:, None],
        generation_logprobs=mask * generation_logprobs,
    )
