"""Scored groups: the arguments of reward functions, rewards and validity of samples, and why groups are dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.config import Config
from dagrl.config.settings import generation_config
from dagrl.data.chat import chat_of
from dagrl.rl.advantages import zero_variance_groups
from dagrl.rl.environments import FAILED as ENVIRONMENT_FAILED, prompt_messages
from dagrl.rl.rewards import (
    ENVIRONMENT,
    SAMPLE_VALUES,
    BoolArray,
    FloatArray,
    RewardRunner,
    Rewards,
    check_failures,
    join_rewards,
    overlong_penalty,
)
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample
from dagrl.telemetry.metrics import ENVIRONMENT_FAILURES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAIN, VALIDATION = "train", "validation"  # splits of the data

ZERO_VARIANCE, FAILED = "zero_variance", "failed"
"""Why dynamic sampling drops a group: all rewards are equal, or fewer than two samples are valid."""


@dataclass(frozen=True)
class ScoredGroup:
    """A group's samples with their rewards. `values` [n] are the rewards after shaping.

    `valid` [n] is False for samples that the reward excludes, or that it or the environment failed for; they are not trained
    on.
    """

    group: RolloutGroup
    samples: list[Sample]
    rewards: Rewards
    values: FloatArray
    valid: BoolArray


@dataclass(frozen=True)
class Untrained:
    """A scored group that no step trains on: of the `split` validation, or `dropped` for a reason."""

    group: ScoredGroup
    split: str = VALIDATION
    dropped: str = ""


def reward_texts(samples: Sequence[Sample]) -> tuple[list[str], list[str], list[str]]:
    """Returns the positional arguments of reward functions: prompts, completions and references."""
    return (
        [sample.prompt.text for sample in samples],
        [sample.text.partition(f"\n{end}")[0] if (end := sample.prompt.until) else sample.text for sample in samples],
        [sample.prompt.reference for sample in samples],
    )


def reward_values(
    group: RolloutGroup, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerFast, names: Collection[str]
) -> list[dict[str, Any]]:
    """Returns the values of each sample by name: those `names` of `SAMPLE_VALUES`, which win, and the columns of its
    example."""
    makers: dict[str, Callable[[int, Sample], Any]] = {
        "messages": lambda place, sample: messages_of(sample, tokenizer),
        "prompt_ids": lambda place, sample: sample.prompt.tokens.tolist(),
        "completion_ids": lambda place, sample: sample.completion.tokens.tolist(),
        "logprobs": lambda place, sample: sample.completion.logprobs.tolist(),
        "columns": lambda place, sample: dict(sample.prompt.columns),
        "task": lambda place, sample: sample.prompt.task,
        "metadata": lambda place, sample: _metadata(group, place, sample),
    }
    return [
        {**sample.prompt.columns, **{name: makers[name](place, sample) for name in SAMPLE_VALUES if name in names}}
        for place, sample in enumerate(samples)
    ]


def messages_of(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Returns the conversation: the prompt's messages, the policy's turns as `assistant`, and the environment's replies."""
    prompt, episode = sample.prompt, sample.completion
    messages = prompt_messages(prompt)
    spans = episode.spans()
    texts = chat_of(tokenizer).decoder([episode.tokens[start:end] for start, end in spans])
    for (start, _), text in zip(spans, texts, strict=True):
        messages.append({"role": "assistant" if episode.sampled[start] else "environment", "content": text})
    return messages


def _metadata(group: RolloutGroup, place: int, sample: Sample) -> Mapping[str, Any]:
    episode = sample.completion
    return {
        "group": group.number,
        "place": place,
        "source": sample.prompt.source,
        "finish_reason": episode.finish_reason,
        "turns": episode.turns,
        "turn_rewards": given_rewards(episode),
        "sampled": episode.sampled.tolist(),
        "versions": episode.versions.tolist(),
        "validation": group.key < 0,
    }


def with_turn_rewards(config: Config, rewards: Rewards, samples: Sequence[Sample]) -> Rewards:
    """Adds the environment's rewards to each sample's: the sum of its turns as the part `environment`, and named ones."""
    turns = [given_rewards(sample.completion) for sample in samples]
    named = [sample.completion.reward_parts for sample in samples]
    parts = {ENVIRONMENT: np.array([*map(sum, turns)], np.float32)} if any(turns) else {}
    for name in dict.fromkeys(name for item in named for name in item):
        parts[name] = np.array([item.get(name, np.nan) for item in named], np.float32)
    values = rewards.values
    for name, part in parts.items():
        values = values + config.reward.weights.get(name, 1.0) * np.nan_to_num(part) * rewards.answered
    return replace(rewards, values=values.astype(np.float32), parts={**rewards.parts, **parts}) if parts else rewards


def given_rewards(episode: Episode) -> list[float]:
    """Returns the rewards of the turns that the environment rewarded."""
    return [reward for reward in episode.turn_rewards if reward is not None]


def scored_group(config: Config, group: RolloutGroup, samples: list[Sample], rewards: Rewards) -> ScoredGroup:
    """Returns the group with its rewards, shaped as `grpo.reward_shaping` says."""
    values, shaping = rewards.values, config.grpo.reward_shaping
    if shaping.enabled:
        lengths = [sample.completion.sampled.sum() for sample in samples]  # tokens of the environment do not count
        values = values + overlong_penalty(lengths, shaping, generation_config(config).max_new_tokens)
    return ScoredGroup(group, samples, rewards, values, valid_samples(rewards, samples))


def check_groups(
    config: Config, reward: RewardRunner, groups: Sequence[ScoredGroup], *, may_all_fail: bool = False
) -> tuple[Rewards, list[Sample]]:
    """Returns the rewards and samples of groups. Raises RunError if too many failed; see `check_failures`."""
    samples, rewards = samples_in(groups), join_rewards([group.rewards for group in groups])
    reward.check(rewards, may_all_fail=may_all_fail)
    failures = [sample.completion.failure for sample in samples if not answered(sample)]
    limit, message = config.environment.max_failed_share, next(iter(failures), "")
    check_failures("environment", len(failures), len(samples), message, limit, may_all_fail=may_all_fail)
    if len(failures) < len(samples):  # those that the environment fails for may have no parts
        reward.check_parts(rewards)
    return rewards, samples


def samples_in(groups: Sequence[ScoredGroup]) -> list[Sample]:
    """Returns the samples, group by group."""
    return [sample for group in groups for sample in group.samples]


def equal_share(groups: Sequence[ScoredGroup]) -> float:
    """Returns the share of the groups whose valid samples have equal rewards, or of which fewer than two are valid."""
    return sum(bool(zero_variance_groups([group.values], [group.valid])[0]) for group in groups) / len(groups)


def drop_reason(group: ScoredGroup) -> str:
    """Returns why dynamic sampling drops the group; "" if it keeps it."""
    if np.count_nonzero(group.valid) < 2:
        return FAILED
    return ZERO_VARIANCE if zero_variance_groups([group.rewards.values], [group.valid])[0] else ""


def answered(sample: Sample) -> bool:
    """Whether the environment answered the sample, or was not asked."""
    return sample.completion.finish_reason != ENVIRONMENT_FAILED


def environment_failures(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the number of samples that the environment failed for, as a metric."""
    return {ENVIRONMENT_FAILURES: float(sum(not answered(sample) for sample in samples))}


def rendered_differently(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns the share of conversations of several turns that have other tokens if the template renders them again."""
    again = [episode.renders_again for episode in episodes if episode.renders_again is not None]
    return {"environment/rendered_differently": float(again.count(False) / len(again))} if again else {}


def valid_samples(rewards: Rewards, samples: Sequence[Sample]) -> BoolArray:
    """Returns the mask [n] of the samples with a reward that the environment did not fail for."""
    return rewards.answered & np.array([answered(sample) for sample in samples], np.bool_)


def mean_reward(rewards: Rewards, samples: Sequence[Sample]) -> float:
    """Returns the mean reward of the valid samples; 0 if there are none."""
    values = rewards.values[valid_samples(rewards, samples)]
    return float(values.mean()) if len(values) else 0.0


def reward_means(rewards: Rewards, samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Returns metrics of the valid samples: the mean of each part of the reward, and the mean reward of each task."""
    valid = valid_samples(rewards, samples)
    means = {f"{prefix}parts/{name}": mean for name, mean in rewards.means(valid).items()}
    tasks = np.array([sample.prompt.task for sample in samples])
    for task in sorted(set(tasks[valid].tolist()) - {""}):
        means[f"{prefix}tasks/{task}"] = float(rewards.values[valid & (tasks == task)].mean())
    return means
