"""Scored groups: samples with their rewards, which of them count, and which groups have something to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dagrl.advantages import zero_variance_groups
from dagrl.config import Config
from dagrl.config.settings import generation_config
from dagrl.environments import FAILED as ENVIRONMENT_FAILED
from dagrl.loops.episodes import RolloutGroup, Sample
from dagrl.rewards import BoolArray, FloatArray, Rewards, overlong_penalty

ZERO_VARIANCE, FAILED = "zero_variance", "failed"
"""Why dynamic sampling drops a group: equal rewards, or fewer than two samples that count."""


@dataclass(frozen=True)
class ScoredGroup:
    """A group's samples with their rewards; `values` [n] are the rewards with what shaping added.

    `counted` [n] is False for samples that the reward function or the environment failed for: they teach nothing.
    """

    group: RolloutGroup
    samples: list[Sample]
    rewards: Rewards
    values: FloatArray
    counted: BoolArray


def scored_group(config: Config, group: RolloutGroup, samples: list[Sample], rewards: Rewards) -> ScoredGroup:
    """The group with its rewards, shaped as `grpo.reward_shaping` says."""
    values, shaping = rewards.values, config.grpo.reward_shaping
    if shaping.enabled:
        lengths = [sum(sample.completion.sampled) for sample in samples]  # an environment's words are not the policy's
        values = values + overlong_penalty(lengths, shaping, generation_config(config).max_new_tokens)
    return ScoredGroup(group, samples, rewards, values, counted(rewards, samples))


def useless(group: ScoredGroup) -> str:
    """Why a group has nothing to learn from; "" where it has."""
    if np.count_nonzero(group.counted) < 2:
        return FAILED
    return ZERO_VARIANCE if zero_variance_groups([group.rewards.values], [group.counted])[0] else ""


def answered(sample: Sample) -> bool:
    """Whether the environment did not fail for it."""
    return sample.completion.finish_reason != ENVIRONMENT_FAILED


def counted(rewards: Rewards, samples: Sequence[Sample]) -> BoolArray:
    """Samples [n] that neither the reward function nor the environment failed for."""
    return rewards.answered & np.array([answered(sample) for sample in samples], np.bool_)


def mean_reward(rewards: Rewards, samples: Sequence[Sample]) -> float:
    """Of the samples that count; 0 if none does."""
    values = rewards.values[counted(rewards, samples)]
    return float(values.mean()) if len(values) else 0.0
