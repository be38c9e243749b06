"""Makes the rows of `rollouts/`: samples that a training step learned from, and samples of no step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.data.media import name_of
from dagrl.rl.rollout.episodes import Episode, Sample
from dagrl.rl.rollout.scoring import FAILED, TRAIN, ScoredGroup, Untrained, answered
from dagrl.runtime.shapes import Array, Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LogprobColumns = Mapping[str, Mapping[int, Array]]
"""Log-probabilities of the train workers, by name and row id: float32 [tokens] of the whole row."""

BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of a token that is a part of a character

LOGPROBS = {"train_logprobs": "prev_logprobs", "reference_logprobs": "reference_logprobs", "entropy": "entropy"}

NO_REWARD, OVERLONG = "no_reward", "overlong"
"""Why a sample of a batch is not trained on: its reward failed or excludes it, or `grpo.overlong_filtering` does."""


def rollout_rows(
    groups: Sequence[ScoredGroup], batch: Batch, columns: LogprobColumns, step: int, texts: TokenTexts
) -> list[dict[str, Any]]:
    """Returns one row per sample of `groups`. `batch` is the step's, with as many rows for each, in the same order."""
    rows: list[dict[str, Any]] = []
    samples = sum(len(group.samples) for group in groups)
    for group in groups:
        for place, sample in enumerate(group.samples):
            index = len(rows) * batch.rows // samples
            dropped = _why_not(group, place, trained=bool(batch["loss_mask"][index].any()))
            rows.append(
                {
                    **_row(group, place, step, TRAIN, dropped, texts),
                    "advantage": _advantage(batch, index),
                    **_logprobs(sample.completion, columns, int(batch["row_ids"][index])),
                    "conversations": _conversations(sample, texts, columns, batch["row_ids"][index + 1 :]),
                }
            )
    return rows


def untrained_rows(untrained: Sequence[Untrained], step: int, texts: TokenTexts) -> list[dict[str, Any]]:
    """Returns one row per sample of groups that no step trains on."""
    return [
        {
            **_row(group.group, place, step, group.split, group.dropped, texts),
            "advantage": 0.0,
            **dict.fromkeys(LOGPROBS),
            "conversations": _conversations(group.group.samples[place], texts),
        }
        for group in untrained
        for place in range(len(group.group.samples))
    ]


def _row(group: ScoredGroup, place: int, step: int, split: str, dropped: str, texts: TokenTexts) -> dict[str, Any]:
    sample = group.samples[place]
    return {
        "step": step,
        "split": split,
        "dropped": dropped,
        "group": group.group.number,
        "place": place,
        "reward": group.rewards.values[place],
        "reward_parts": _reward_parts(group, place),
        "valid": bool(group.valid[place]) and not dropped,
        "source": sample.prompt.source,
        "task": sample.prompt.task,
        "reference": sample.prompt.reference,
        "completion": sample.text,
        "failure": sample.completion.failure or _reward_failure(group, place),
        **_conversation(sample.completion, texts),
    }


def _why_not(group: ScoredGroup, place: int, *, trained: bool) -> str:
    """Returns why a sample of a batch is not trained on; "" if it is."""
    if not group.valid[place]:
        return NO_REWARD if answered(group.samples[place]) else FAILED
    return OVERLONG if not trained and group.samples[place].completion.sampled.any() else ""


def _reward_failure(group: ScoredGroup, place: int) -> str:
    """Returns what the reward raised first in the group, if it failed for this sample; unknown where it excludes samples."""
    rewards = group.rewards
    return "" if rewards.answered[place] or rewards.excluded else rewards.message


def _reward_parts(group: ScoredGroup, place: int) -> dict[str, float]:
    """Returns the named parts of the reward, or else the reward, and what shaping added to it."""
    reward = float(group.rewards.values[place])
    shaping = float(group.values[place]) - reward
    named = {name: float(values[place]) for name, values in group.rewards.parts.items() if not np.isnan(values[place])}
    return {**(named or {"function": reward}), **({"shaping": shaping} if shaping else {})}


def _advantage(batch: Batch, row: int) -> float:
    """Returns the mean advantage over the tokens in the loss; 0 if there are none."""
    mask = batch["loss_mask"][row] > 0
    return float(batch["advantages"][row][mask].mean()) if mask.any() else 0.0


def _conversations(
    sample: Sample, texts: TokenTexts, columns: LogprobColumns | None = None, row_ids: Sequence[int] | Array = ()
) -> list[dict[str, Any]]:
    """Returns an agent's conversations after the first. `row_ids` are the ids of their rows."""
    episode = sample.completion
    trained = [_logprobs(row, columns or {}, int(row_id)) for row, row_id in zip(episode.more, row_ids, strict=False)]
    unknown = [dict.fromkeys(LOGPROBS)] * (len(episode.more) - len(trained) + len(episode.others))
    return [
        {"trained": place < len(trained), **_conversation(row, texts), **values}
        for place, (row, values) in enumerate(zip([*episode.more, *episode.others], [*trained, *unknown], strict=True))
    ]


def _conversation(episode: Episode, texts: TokenTexts) -> dict[str, Any]:
    pieces = texts(episode.tokens.tolist())
    return {
        "prompt": episode.prompt.text,
        "media": [name_of(medium) for medium in episode.media_ids],
        "turns": _turns(episode, pieces),
        "finish_reason": episode.finish_reason,
        "prompt_tokens": episode.prompt.tokens,
        "tokens": episode.tokens,
        "token_texts": pieces,
        "sampled": episode.sampled,
        "logprobs": episode.logprobs,
        "versions": episode.versions,
    }


def _turns(episode: Episode, pieces: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the turns of the policy and of the environment, each with its text, the range of its tokens, and its reward
    if the environment gave one."""
    spans = episode.spans()
    made = [start for start, _ in spans if episode.sampled[start]]
    rewards = dict(zip(made, episode.turn_rewards, strict=False))  # the last turn may have been cut, and not asked about
    return [
        {
            "role": "policy" if episode.sampled[start] else "environment",
            "text": "".join(pieces[start:end]),
            "start": start,
            "end": end,
            "reward": rewards.get(start),
        }
        for start, end in spans
    ]


def _logprobs(episode: Episode, columns: LogprobColumns, row_id: int) -> dict[str, Any]:
    start, values = len(episode.prompt), {}
    for name, source in LOGPROBS.items():
        row = columns.get(source, {}).get(row_id)
        values[name] = None if row is None else np.asarray(row[start:], np.float32)
    return values


class TokenTexts:
    """The text of each token of a sequence. Tokens that share a character have it at the first of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._broken: set[int] = set()  # tokens with a part of a character

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text of each token. Their concatenation is the text of all."""
        for token in set(tokens).difference(self._known):  # `- self._known.keys()` would visit all known tokens
            self._known[token] = self._tokenizer.decode([token])
            if BROKEN in self._known[token]:
                self._broken.add(token)
        texts = [self._known[token] for token in tokens]
        return texts if self._broken.isdisjoint(tokens) else self._joined(tokens, texts)

    def _joined(self, tokens: Sequence[int], texts: list[str]) -> list[str]:
        at = 0
        while at < len(texts):
            end = at + 1
            while BROKEN in texts[at] and end < len(texts) and BROKEN in texts[end]:
                end += 1
            if end - at > 1:
                texts[at:end] = [self._tokenizer.decode(tokens[at:end]), *[""] * (end - at - 1)]
            at = end
        return texts
