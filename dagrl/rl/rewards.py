"""Reward functions, their runner, and the penalty for overlong completions.

A reward function takes `(prompts, completions, references)`, three lists of texts of equal length, and returns one float per
sample. With `reward.batched: false` it takes one text of each and returns one float. It may be a coroutine function. It runs
in processes of its own (`dagrl.rl.functions`). A sample for which it raises or hangs is counted as failed and excluded
from losses, baselines and means.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dagrl.config import RewardConfig, RewardShapingConfig
from dagrl.errors import RunError
from dagrl.rl.functions.answers import Answers, Failed
from dagrl.rl.functions.runner import FunctionRunner

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

MAX_FLOAT32 = float(np.finfo(np.float32).max)


def exact_match(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns 1 where the completion equals the reference, ignoring surrounding whitespace, else 0."""
    return [float(given.strip() == wanted.strip()) for given, wanted in zip(completions, references, strict=True)]


@dataclass(frozen=True)
class Rewards:
    """The reward of each `answered` sample, 0 for failed ones, and the message of the first failure."""

    values: FloatArray  # [n]
    answered: BoolArray  # [n]
    message: str = ""

    @property
    def failed(self) -> int:
        """Number of samples without a reward."""
        return int((~self.answered).sum())


def shuffled(rewards: FloatArray, seed: int, step: int) -> FloatArray:
    """Returns the rewards [n] permuted over the samples, for a control run that cannot learn."""
    return np.random.default_rng((seed, step)).permutation(rewards)


class RewardRunner:
    """Runs the configured reward function. Use it as a context manager."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError if the import path is wrong."""
        self._max_failed_share = config.max_failed_share
        self._runner = FunctionRunner.configured(config.function, "reward", config, _checked)

    def __enter__(self) -> Self:
        self._runner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.close()

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]) -> Rewards:
        """Returns the rewards [n] of n samples. Raises RunError if too many failed; see `check_failures`."""
        rewards = rewards_of(self.submit(prompts, completions, references).result())
        self.check(rewards)
        return rewards

    def check(self, rewards: Rewards, *, may_all_fail: bool = False) -> None:
        """Raises RunError if too many failed; see `check_failures`."""
        failed, total, limit = rewards.failed, len(rewards.values), self._max_failed_share
        check_failures("reward", failed, total, rewards.message, limit, may_all_fail=may_all_fail)

    def submit(self, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]) -> Future[Answers]:
        """Rewards n samples in the background. Convert the result with `rewards_of`."""
        return self._runner.submit(prompts, completions, references)


def rewards_of(answers: Answers) -> Rewards:
    """Converts the function's answers to rewards."""
    messages = [answer.message for answer in answers if isinstance(answer, Failed)]
    values = np.array([0.0 if isinstance(answer, Failed) else answer for answer in answers], np.float32)
    answered = np.array([not isinstance(answer, Failed) for answer in answers], np.bool_)
    return Rewards(values, answered, messages[0] if messages else "")


def join_rewards(parts: Sequence[Rewards]) -> Rewards:
    """Concatenates rewards."""
    messages = [part.message for part in parts if part.message]
    values = np.concatenate([part.values for part in parts] or [np.zeros(0, np.float32)])
    answered = np.concatenate([part.answered for part in parts] or [np.zeros(0, np.bool_)])
    return Rewards(values, answered, messages[0] if messages else "")


def check_failures(section: str, failed: int, total: int, message: str, limit: float, *, may_all_fail: bool = False) -> None:
    """Warns of failed samples, or raises RunError if their share exceeds the `limit`, `<section>.max_failed_share`.

    Also raises if all samples failed, unless `may_all_fail`. A training step has several samples, so then the function is
    broken and there is nothing to learn. A validation may have a single sample, and the run can continue without it.
    """
    if failed and failed == total and not may_all_fail:
        raise RunError(f"{section}.function failed for all {total} samples: {message}")
    if failed > limit * total:
        raise RunError(
            f"{section}.function failed for {failed} of {total} samples, more than {section}.max_failed_share = {limit:g}: "
            f"{message}"
        )
    if failed:
        logger.warning("%s.function failed for %d of %d samples: %s", section, failed, total, message)


def overlong_penalty(lengths: npt.ArrayLike, config: RewardShapingConfig, max_new_tokens: int) -> FloatArray:
    """Returns the penalty to add to the rewards of completions of `lengths` tokens: [n] float32, at most 0.

    It is 0 up to `max_response_length - overlong_buffer_length`, falls linearly to `-overlong_buffer_penalty` at
    `max_response_length`, and stays there (DAPO, arXiv:2503.14476, equation 13).
    """
    longest = config.max_response_length or max_new_tokens
    beyond = np.asarray(lengths, np.float32) - (longest - config.overlong_buffer_length)
    share = np.clip(beyond / config.overlong_buffer_length, 0.0, 1.0)
    return (-config.overlong_buffer_penalty * share).astype(np.float32)


def math_answer(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns 1 where the completion's final answer is mathematically equal to the reference's, else 0.

    A reference is an answer (`72`, `\\frac{1}{2}`) or a GSM8K solution with the answer after `####`. The completion's answer
    is in `\\boxed{}`, or else its last expression or number. Needs `dagrl[math]`.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns at each call that its timeouts are off
    # The runner has deadlines. math-verify's own use signals, which work only in a main thread.
    wanted = [parse(f"${_final_answer(text)}$", parsing_timeout=None) for text in references]
    given = [parse(text, parsing_timeout=None) for text in completions]
    return [float(verify(gold, answer, timeout_seconds=None)) for gold, answer in zip(wanted, given, strict=True)]


math_answer.requires = ("math_verify",)  # type: ignore[attr-defined]  # checked before a run starts


def _final_answer(reference: str) -> str:
    return reference.rpartition("####")[2].strip().replace(",", "") if "####" in reference else reference.strip()


def _checked(answer: Any) -> float:
    try:
        reward = float(answer)
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"it returned a reward that is not a number: {error}") from error
    if not abs(reward) <= MAX_FLOAT32:
        raise ValueError("it returned a reward that is not finite in float32")
    return reward
