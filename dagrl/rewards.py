"""Reward functions, what runs them, and what is added to their rewards.

A reward function takes `(prompts, completions, references)`, three lists of texts of one length, and returns one float each
(or takes one text of each, with `reward.batched: false`); it may be a coroutine function. It runs in processes of its own
(`dagrl.function_runner`): a sample for which it raises or hangs is counted, and no part of a loss, a baseline or a mean.
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
from dagrl.function_runner import Answers, Failed, FunctionRunner

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

LARGEST = float(np.finfo(np.float32).max)


def exact_match(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """1 where the completion is the reference, spaces around it aside, and 0 elsewhere."""
    return [float(given.strip() == wanted.strip()) for given, wanted in zip(completions, references, strict=True)]


@dataclass(frozen=True)
class Rewards:
    """One reward for each sample that was `answered`, 0 for the others, and the message of the first of those."""

    values: FloatArray  # [n]
    answered: BoolArray  # [n]
    message: str = ""

    @property
    def failed(self) -> int:
        """Samples without a reward."""
        return int((~self.answered).sum())


def shuffled(rewards: FloatArray, seed: int, step: int) -> FloatArray:
    """The rewards [n] dealt out to other samples at random: the control of a run that must not learn."""
    return np.random.default_rng((seed, step)).permutation(rewards)


class RewardRunner:
    """Runs the configured function. Use it as a context manager, or call `close`."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError when the import path leads nowhere."""
        self._max_failed_share = config.max_failed_share
        self._runner = FunctionRunner.configured(config.function, "reward", config, _checked)

    def __enter__(self) -> Self:
        self._runner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.close()

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]) -> Rewards:
        """Rewards [n] of n samples. The whole list goes to the function at once; one sample at a time only if that fails.

        Raises RunError as `check_failures` does.
        """
        rewards = rewards_of(self.submit(prompts, completions, references).result())
        self.check(rewards)
        return rewards

    def check(self, rewards: Rewards, *, may_all_fail: bool = False) -> None:
        """Raise RunError when too many are missing; see `check_failures`."""
        failed, total, limit = rewards.failed, len(rewards.values), self._max_failed_share
        check_failures("reward", failed, total, rewards.message, limit, may_all_fail=may_all_fail)

    def submit(self, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]) -> Future[Answers]:
        """The answers to n samples, made beside the caller; see `rewards_of`."""
        return self._runner.submit(prompts, completions, references)


def rewards_of(answers: Answers) -> Rewards:
    """Rewards from what the function answered."""
    messages = [answer.message for answer in answers if isinstance(answer, Failed)]
    values = np.array([0.0 if isinstance(answer, Failed) else answer for answer in answers], np.float32)
    answered = np.array([not isinstance(answer, Failed) for answer in answers], np.bool_)
    return Rewards(values, answered, messages[0] if messages else "")


def join_rewards(parts: Sequence[Rewards]) -> Rewards:
    """The rewards of all parts, in their order."""
    messages = [part.message for part in parts if part.message]
    values = np.concatenate([part.values for part in parts] or [np.zeros(0, np.float32)])
    answered = np.concatenate([part.answered for part in parts] or [np.zeros(0, np.bool_)])
    return Rewards(values, answered, messages[0] if messages else "")


def check_failures(section: str, failed: int, total: int, message: str, limit: float, *, may_all_fail: bool = False) -> None:
    """Warn of the samples, `failed` of `total`, that the function of a `section` of the configuration has failed for.

    Raises RunError when their share passes `<section>.max_failed_share`, the `limit`; and, unless they `may_all_fail`, when
    all have failed: a training step has several samples, so that the function itself is then at fault, and nothing to learn.
    A validation may have a single sample, and the run can go on without it: there the share alone counts, and 1 is no limit.
    """
    if failed and failed == total and not may_all_fail:
        raise RunError(f"{section}.function failed for all {total} samples: {message}")
    if failed > limit * total:
        raise RunError(
            f"{section}.function failed for {failed} of {total} samples, a larger share than {section}.max_failed_share = "
            f"{limit:g}: {message}"
        )
    if failed:
        logger.warning("%s.function failed for %d of %d samples: %s", section, failed, total, message)


def overlong_penalty(lengths: npt.ArrayLike, config: RewardShapingConfig, max_new_tokens: int) -> FloatArray:
    """What is added to the rewards of completions of `lengths` tokens, [n] float32, 0 or below (DAPO, equation 13).

    0 up to `max_response_length - overlong_buffer_length`, then falling linearly to `-overlong_buffer_penalty` at
    `max_response_length`, and no further.
    """
    longest = config.max_response_length or max_new_tokens
    beyond = np.asarray(lengths, np.float32) - (longest - config.overlong_buffer_length)
    share = np.clip(beyond / config.overlong_buffer_length, 0.0, 1.0)
    return (-config.overlong_buffer_penalty * share).astype(np.float32)


def math_answer(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """1 where the completion's final answer equals the reference's as mathematics, else 0; needs `dagrl[math]`.

    References are answers (`72`, `\\frac{1}{2}`) or GSM8K's solutions, whose answer follows `####`; `math-verify` reads the
    completion's answer from `\\boxed{}`, or else the last expression or number in it.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn at each call that its deadlines are off
    # Deadlines are the runner's: math-verify's own use signals, which work in a main thread alone.
    wanted = [parse(f"${_final_answer(text)}$", parsing_timeout=None) for text in references]
    given = [parse(text, parsing_timeout=None) for text in completions]
    return [float(verify(gold, answer, timeout_seconds=None)) for gold, answer in zip(wanted, given, strict=True)]


math_answer.requires = ("math_verify",)  # type: ignore[attr-defined]  # looked at before a run starts


def _final_answer(reference: str) -> str:
    return reference.rpartition("####")[2].strip().replace(",", "") if "####" in reference else reference.strip()


def _checked(answer: Any) -> float:
    try:
        reward = float(answer)
    except Exception as error:  # whatever the class of the answer raises
        raise ValueError(f"it returned a reward that is no number: {error}") from error
    if not abs(reward) <= LARGEST:
        raise ValueError("it returned a reward that is not finite, or too large for float32")
    return reward
