"""Tries the user's reward functions on an example of each task before a run starts, to find mistakes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from dagrl.config import Config
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError, RunError
from dagrl.rl.functions.answers import Answers, Failed
from dagrl.rl.rewards import RewardFunction, RewardRunner, reward_functions
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample
from dagrl.rl.rollout.scoring import reward_texts, reward_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SHIPPED = ("dagrl.rl.rewards:", "dagrl.bench.")
"""Starts of the import paths of functions that are not tried."""

MADE_UP = "42"
"""The completion of an example without a reference."""

SAMPLES = 2
"""Samples of a prompt: a function that answers a whole batch with one number gives itself away."""


def try_rewards(config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast) -> None:
    """Rewards the reference of the first example of each task, or a made-up completion if it has none.

    Raises ConfigError for a function that raises, hangs, or gives no rewards, and if all of them exclude every sample.
    """
    own = [item for item in reward_functions(config.reward) if not item.path.startswith(SHIPPED)]
    if not own:
        return
    named = {item.name: config.reward.functions[item.name] for item in own if item.name}
    examples, numbers = dict[str, Prompt](), 0
    for prompt in prompts:
        examples.setdefault(prompt.task, prompt)
    with RewardRunner(config.reward.model_copy(update={"functions": named}), retries=False) as runner:
        for prompt in examples.values():
            group = _group(prompt, tokenizer)
            samples = [Sample(prompt, episode, prompt.reference or MADE_UP) for episode in group.episodes]
            try:
                tried = runner.answers_by_function(*reward_texts(samples), partial(reward_values, group, samples, tokenizer))
                numbers += sum(_numbers(item, answers, prompt) for item, answers in tried)
            except RunError as error:
                raise ConfigError(str(error)) from error
    if not numbers and len(own) == len(reward_functions(config.reward)):
        names = ", ".join(f"{item.key}.function {item.path}" for item in own)
        raise ConfigError(
            f"{names} returned None for every sample that was tried, which excludes it from training; return a number for "
            f"samples to learn from. Tried: the {_completion(next(iter(examples.values())))}"
        )


def _numbers(item: RewardFunction, answers: Answers, prompt: Prompt) -> int:
    """Returns how many samples have a reward. Raises ConfigError if one failed."""
    for answer in answers:
        if isinstance(answer, Failed):
            raise ConfigError(
                f"{item.key}.function {item.path}: {answer.message}. Tried: the {_completion(prompt)}. Expected for each: a "
                "number, a dictionary of numbers, or None to exclude the sample (docs/rewards.md)"
            )
    logger.info("%s.function %s: %s for the %s", item.key, item.path, answers[0], _completion(prompt))
    return sum(answer is not None for answer in answers)


def _completion(prompt: Prompt) -> str:
    what = "reference" if prompt.reference else f"made-up completion {MADE_UP!r}"
    return f"{what} of {prompt.source}, {SAMPLES} times in a batch"


def _group(prompt: Prompt, tokenizer: PreTrainedTokenizerFast) -> RolloutGroup:
    """Returns a finished group whose completions are the reference."""
    tokens = list(tokenizer.encode(prompt.reference or MADE_UP, add_special_tokens=False))
    columns = {"tokens": tokens, "logprobs": [0.0] * len(tokens), "versions": [0] * len(tokens)}
    episodes = [
        Episode(prompt, 0, len(tokens), **columns, sampled=[True] * len(tokens), finish_reason="stop", turns=1)  # type: ignore[arg-type]
        for _ in range(SAMPLES)
    ]
    return RolloutGroup(0, 0, episodes)
