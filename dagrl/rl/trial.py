"""Tries a user's algorithm, reward functions and environment before a run starts, to find mistakes early.

An algorithm is tried on a few random rows, the others on an example of each task.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from dagrl.config import ALGORITHMS, Config
from dagrl.data.media import MediaProcessor, MediaStore
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError, RunError
from dagrl.imports import running
from dagrl.rl.advantages import rewards_at_end
from dagrl.rl.algorithm import KEY, Algorithm, advantages_of, algorithm_of, token_advantages_of
from dagrl.rl.functions.answers import Answers, Failed
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.preferences import PreferenceAlgorithm, pair_losses
from dagrl.rl.rewards import SHIPPED, RewardFunction, RewardRunner, check_weights, reward_functions
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample, new_group
from dagrl.rl.rollout.scoring import reward_texts, reward_values
from dagrl.rl.rollout.turns import open_turns
from dagrl.telemetry.record import RunPaths

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

ROWS, TOKENS = 2, 5

logger = logging.getLogger(__name__)

MADE_UP = "42"  # the completion of an example without a reference
SAMPLES = 2  # samples of a prompt: a function that answers a whole batch with one number gives itself away


def try_algorithm(config: Config) -> None:
    """Raises ConfigError if the algorithm's loss or advantages fail, or give values that nothing can be learned from."""
    algorithm = algorithm_of(config)
    if algorithm.learns_from == "demonstrations" and algorithm.columns:
        raise ConfigError(
            f"{KEY}: {config.algorithm} learns from demonstrations and has the columns {', '.join(algorithm.columns)}; "
            "these are computed for samples. Set `columns = {}`"
        )
    if algorithm.learns_from == "preferences":
        try_pair_loss(algorithm)
        return
    try_loss(algorithm)
    if algorithm.learns_from == "samples":
        try_advantages(algorithm)


def try_loss(algorithm: Algorithm) -> None:
    """Runs the loss on random tokens. Raises ConfigError if it fails, or if its values or gradients are not finite."""
    import torch

    from dagrl.rl.losses import Denominators, batch_loss
    from dagrl.rl.token_losses import KEY as LOSS_KEY

    name, key, columns = algorithm.config.algorithm, KEY, [*algorithm.columns]
    data = {"loss_mask": torch.ones(ROWS, TOKENS)}
    if algorithm.learns_from == "samples":
        columns.append("generation_logprobs")
        data["advantages"] = torch.tensor([[1.0], [-0.5]]).expand(ROWS, TOKENS)
        if name in ALGORITHMS:
            name, key = algorithm.config.loss_fn.name, LOSS_KEY
    random = torch.rand(1 + len(columns), ROWS, TOKENS, generator=torch.Generator().manual_seed(0))
    first, *others = -random - 0.1
    logprobs: torch.Tensor = first.requires_grad_()
    data = {**dict(zip(columns, others, strict=True)), **data}

    def of_others(ids: torch.Tensor) -> torch.Tensor:  # log-probabilities [rows, tokens, k]
        return logprobs[..., None].expand(*logprobs.shape, ids.shape[-1])

    with running(name, key):
        output = batch_loss(algorithm, logprobs, data, Denominators(ROWS * TOKENS, ROWS), lookup=of_others)
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
    if not (output.loss.isfinite() and gradient.isfinite().all()):
        raise ConfigError(f"{key}: {name} gives costs or gradients that are not finite for ordinary log-probabilities")


def try_pair_loss(algorithm: Algorithm) -> None:
    """Runs the loss on random pairs. Raises ConfigError if it fails, or if its values or gradients are not finite."""
    if not isinstance(algorithm, PreferenceAlgorithm):
        raise ConfigError(
            f"{KEY}: {algorithm.config.algorithm} learns from preferences; derive the class from dagrl.PreferenceAlgorithm"
        )
    generator = np.random.default_rng(0)
    reference = -generator.random(2 * ROWS) - 1 if "reference_logprobs" in algorithm.columns else None
    labels = np.arange(ROWS, dtype=np.float64) if algorithm.unpaired else None
    pair_losses(algorithm, -generator.random(2 * ROWS) - 1, np.full(2 * ROWS, TOKENS), reference, labels)


def try_advantages(algorithm: Algorithm) -> None:
    """Computes advantages of random rewards. Raises ConfigError if that fails."""
    config = algorithm.config
    rewards = np.random.default_rng(0).random((2, max(config.grpo.num_generations_per_prompt, 2)))
    advantages_of(algorithm, rewards, np.ones_like(rewards, np.bool_))
    if algorithm.critic:
        mask = np.ones((ROWS, TOKENS), np.float32)
        token_advantages_of(algorithm, rewards_at_end(rewards[:, 0], mask), mask, mask)


def try_rewards(config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast) -> None:
    """Rewards the reference of the first example of each task, or a made-up completion if it has none.

    Raises ConfigError for a function that raises, hangs, or gives no rewards, if all of them exclude every sample, and for a
    weight of a part of a function that gives numbers.
    """
    own = [item for item in reward_functions(config.reward) if not item.path.startswith(SHIPPED)]
    if not own:
        return
    named = {item.name: config.reward.functions[item.name] for item in own if item.name}
    examples, numbers, has_parts = _first_of_tasks(prompts), 0, False
    with RewardRunner(config.reward.model_copy(update={"functions": named}), retries=False) as runner:
        for prompt in examples:
            group = _group(prompt, tokenizer)
            samples = [Sample(prompt, episode, prompt.reference or MADE_UP) for episode in group.episodes]
            try:
                values = partial(reward_values, group, samples, tokenizer)
                for item, answers in runner.answers_by_function(*reward_texts(samples), values):
                    numbers += _numbers(item, answers, prompt)
                    has_parts |= any(isinstance(answer, dict) for answer in answers)
            except RunError as error:
                raise ConfigError(str(error)) from error
    if numbers and not has_parts and config.environment.agent is None:
        check_weights(config.reward, config.environment.enabled, plain=True)
    if not numbers and len(own) == len(reward_functions(config.reward)):
        names = ", ".join(f"{item.key}.function {item.path}" for item in own)
        raise ConfigError(
            f"{names} returned None for every sample that was tried, which excludes it from training; return a number for "
            f"samples to learn from. Tried: the {_completion(examples[0])}"
        )


def try_environment(
    config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast, processor: MediaProcessor | None = None
) -> None:
    """Begins the first example of each task, and answers with its reference, or a made-up text, as the policy's turn.

    Raises ConfigError if the environment fails, or if what it says cannot be tokenized.
    """
    path = config.environment.function
    if path is None or path.startswith(SHIPPED):
        return
    examples = _first_of_tasks(prompts)
    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="dagrl-"))  # images come into the run's directory
        trial = config.with_keys({"environment.num_workers": 1, "output_dir": scratch})
        shown = [medium for prompt in examples if prompt.media is not None for medium in prompt.media.items]
        MediaStore(RunPaths.of(trial).media, config.data.images).add(shown)
        turns = stack.enter_context(open_turns(trial, tokenizer, processor))
        for number, prompt in enumerate(examples):
            group = new_group(config, number, 0, prompt, [0])
            (episode,) = group.episodes
            ready = turns.start([group])
            while turns.awaited:
                wait(turns.awaited)
                ready += turns.take()
                if ready and not episode.turns:
                    tokens = _tokens(prompt, tokenizer)
                    result = FinishedRequest(0, tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")
                    episode.append(result)
                    episode.turns += 1
                    turns.finish([((group, episode), result)])
            if episode.failure:
                turn = f"Its turn: the {_what(prompt)}" if episode.turns else "It had no turn yet"
                raise ConfigError(f"environment.function {path}: {episode.failure}. Tried: {prompt.source}. {turn}")
            turns.abort(group)


def _first_of_tasks(prompts: Sequence[Prompt]) -> list[Prompt]:
    examples = dict[str, Prompt]()
    for prompt in prompts:
        examples.setdefault(prompt.task, prompt)
    return list(examples.values())


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
    return f"{_what(prompt)} of {prompt.source}, {SAMPLES} times in a batch"


def _what(prompt: Prompt) -> str:
    return "reference" if prompt.reference else f"made-up completion {MADE_UP!r}"


def _tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return list(tokenizer.encode(prompt.reference or MADE_UP, add_special_tokens=False))


def _group(prompt: Prompt, tokenizer: PreTrainedTokenizerFast) -> RolloutGroup:
    """Returns a finished group whose completions are the reference."""
    tokens = _tokens(prompt, tokenizer)
    columns = {"tokens": tokens, "logprobs": [0.0] * len(tokens), "versions": [0] * len(tokens)}
    episodes = [
        Episode(prompt, 0, len(tokens), **columns, sampled=[True] * len(tokens), finish_reason="stop", turns=1)  # type: ignore[arg-type]
        for _ in range(SAMPLES)
    ]
    return RolloutGroup(0, 0, episodes)
