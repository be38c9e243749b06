"""Rewards of samples, and the runner of the configured reward functions. docs/rewards.md has examples.

A reward function takes `(prompts, completions, references)`, three lists of texts of equal length, and returns one answer
per sample. With `reward.batched: false` it takes one text of each and returns one answer. It may be a coroutine function.
Further parameters are filled by name: a column of the data, or one of `SAMPLE_VALUES`. An answer is a number, a dictionary
of named parts (numbers, weighted by `reward.weights`), or None for a sample to exclude. Functions run in processes of their
own (`dagrl.rl.functions`). A sample for which one raises or hangs counts as failed. Excluded and failed samples are in no
loss, baseline or mean.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dagrl.config import FunctionConfig, RewardConfig, RewardShapingConfig
from dagrl.errors import ConfigError, RunError
from dagrl.imports import load_callable
from dagrl.rl.functions.answers import Answers, Failed, join_futures
from dagrl.rl.functions.keywords import keywords_of, takes_texts
from dagrl.rl.functions.runner import FunctionRunner

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Texts = Sequence[str]

MAX_FLOAT32 = float(np.finfo(np.float32).max)

SHIPPED = ("dagrl.rl.rewards:", "dagrl.bench.")  # starts of import paths of functions that give numbers, and are not tried
ENVIRONMENT = "environment"  # name of the part of the reward that the environment gave

SAMPLE_VALUES = ("messages", "prompt_ids", "completion_ids", "logprobs", "columns", "task", "metadata")
"""Names of parameters that every sample has a value for; `dagrl.rl.rollout.scoring` makes them."""


def exact_match(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns 1 where the completion equals the reference, ignoring surrounding whitespace, else 0."""
    return [float(answer.strip() == truth.strip()) for answer, truth in zip(completions, references, strict=True)]


@dataclass(frozen=True)
class SampleReward:
    """The reward of a sample and its parts, NaN where it has none; `value` is None if all functions exclude it."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rewards:
    """The reward of each `answered` sample, 0 for the others, and the message of the first failure.

    `excluded` samples have no reward because the functions returned None. `parts` [n] are NaN where a sample has no such
    part.
    """

    values: FloatArray  # [n]
    answered: BoolArray  # [n]
    message: str = ""
    excluded: int = 0
    parts: Mapping[str, FloatArray] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Number of samples without a reward that are not excluded."""
        return int((~self.answered).sum()) - self.excluded

    def means(self, chosen: BoolArray) -> dict[str, float]:
        """Returns the mean of each part over the `chosen` samples [n] that have it."""
        having = {name: values[chosen & ~np.isnan(values)] for name, values in self.parts.items()}
        return {name: float(values.mean()) for name, values in having.items() if len(values)}


@dataclass(frozen=True)
class RewardFunction:
    """A configured function: its name (empty if it is the only one), its key, and how it runs."""

    name: str
    key: str
    path: str
    config: FunctionConfig
    tasks: tuple[str, ...] | None = None


_Call = tuple[RewardFunction, Sequence[int], Future[Answers] | None]
"""A function, the places of its samples, and its answers to them; None if there are none."""

SampleValues = Callable[[Collection[str]], Sequence[Mapping[str, Any]]]
"""Makes the values of each sample for further parameters, with those of `SAMPLE_VALUES` among the names that it is given."""


def reward_functions(config: RewardConfig) -> list[RewardFunction]:
    """Returns the configured functions. Raises ConfigError if `function` and `functions` are both set."""
    if not config.functions:
        return [] if config.function is None else [RewardFunction("", "reward", config.function, config)]
    if "function" in config.model_fields_set:
        raise ConfigError("reward.function and reward.functions are both set; move the first into reward.functions")
    return [
        RewardFunction(name, f"reward.functions.{name}", item.function, item, item.tasks)
        for name, item in config.functions.items()
    ]


def check_keywords(config: RewardConfig, columns: Iterable[str]) -> None:
    """Raises ConfigError if a function does not take the texts, or has a parameter that no sample has a value for."""
    known = sorted({*SAMPLE_VALUES, *columns})
    for item in reward_functions(config):
        function = load_callable(item.path, f"{item.key}.function")
        if not takes_texts(function):
            raise ConfigError(
                f"{item.key}.function: {item.path} takes {signature(function)}; expected: prompts, completions and "
                f"references by position (with {item.key}.batched=false a single one of each)"
            )
        wanted, _ = keywords_of(function)
        unknown = [name for name, required in wanted.items() if required and name not in known]
        if unknown:
            raise ConfigError(
                f"{item.key}.function: {item.path} has the parameters {', '.join(unknown)}, which no example has; expected, "
                f"after prompts, completions and references: {', '.join(known)}"
            )


def check_weights(config: RewardConfig, has_environment: bool, *, plain: bool = False) -> None:
    """Raises ConfigError for a weight of no part, as far as the names of parts are known before a sample is rewarded.

    `plain`: a single function of the user's gives numbers.
    """
    names = [ENVIRONMENT] if has_environment else []
    items = reward_functions(config)
    if any(not item.name and not (plain or item.path.startswith(SHIPPED)) for item in items):
        return  # it names its parts when it runs
    named = [item.name for item in items if item.name]
    names, parts = [*names, *named], tuple(f"{name}/" for name in named)
    unknown = [name for name in config.weights if name not in names and not name.startswith(parts)]
    if unknown:
        raise ConfigError(_unknown_weights(unknown, [*names, *(f"{part}<part>" for part in parts)]))


def _unknown_weights(unknown: Sequence[str], names: Sequence[str]) -> str:
    parts = f"the parts are {', '.join(names)}" if names else "the reward has no named parts"
    return f"reward.weights: no part has the name {' or '.join(map(repr, unknown))}; {parts}. Correct or remove it"


class RewardRunner:
    """Runs the configured reward functions. Use it as a context manager."""

    def __init__(self, config: RewardConfig, *, retries: bool = True) -> None:
        """Raises ConfigError if an import path is wrong. Without `retries` all samples of a failed batch fail."""
        self._max_failed_share, self._weights = config.max_failed_share, config.weights
        self._functions = reward_functions(config)
        self._runners = [
            FunctionRunner(item.path, item.key, item.config, _checked, arguments="named", retries=retries)
            for item in self._functions
        ]
        self._wanted = [keywords_of(runner.function) for runner in self._runners]
        names = {name for named, takes_any in self._wanted for name in (SAMPLE_VALUES if takes_any else named)}
        self._names = names | ({"task"} if any(item.tasks is not None for item in self._functions) else set())
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for runner in self._runners:
            self._stack.enter_context(runner)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def check(self, rewards: Rewards, *, may_all_fail: bool = False) -> None:
        """Raises RunError if too many failed; see `check_failures`."""
        failed, total, limit = rewards.failed, len(rewards.values) - rewards.excluded, self._max_failed_share
        check_failures("reward", failed, total, rewards.message, limit, may_all_fail=may_all_fail)

    def check_parts(self, rewards: Rewards) -> None:
        """Raises ConfigError, once parts are known, for a weight of a part that no sample has."""
        names = rewards.parts.keys()
        missing = [name for name in self._weights if name not in names and name != ENVIRONMENT]
        unknown = [name for name in missing if self._has_asked(name, names)]
        if unknown and rewards.answered.any():
            raise ConfigError(_unknown_weights(unknown, list(names)))

    def _has_asked(self, weight: str, names: Iterable[str]) -> bool:
        """Whether the function that a weight is for has rewarded a sample; it may be for a task that has not come yet."""
        owners = [item.name for item in self._functions if item.name and f"{weight}/".startswith(f"{item.name}/")]
        return not owners or any(f"{name}/".startswith(f"{owners[0]}/") for name in names)

    def submit(
        self, prompts: Texts, completions: Texts, references: Texts, values: SampleValues | None = None
    ) -> Future[Answers]:
        """Rewards n samples in the background. Convert the result with `rewards_of`.

        `values` is called only if a function has further parameters. It has the same names for all samples.
        """
        calls = self._calls((prompts, completions, references), values)
        return join_futures([future for *_, future in calls if future], lambda: self._join(len(prompts), calls))

    def answers_by_function(
        self, prompts: Texts, completions: Texts, references: Texts, values: SampleValues
    ) -> Iterator[tuple[RewardFunction, Answers]]:
        """Yields each function's own answers for the samples of its tasks: `Failed`, a number, parts, or None."""
        for item, _, future in self._calls((prompts, completions, references), values):
            if future is not None:
                yield item, future.result()

    def _calls(self, texts: tuple[Texts, Texts, Texts], values: SampleValues | None) -> list[_Call]:
        """Starts a call of each function, for the samples of its tasks."""
        count = len(texts[0])
        rows = values(self._names) if values is not None and self._names else [{}] * count
        calls: list[_Call] = []
        for runner, item, (names, takes_any) in zip(self._runners, self._functions, self._wanted, strict=True):
            missing = {name: None for name, required in names.items() if required and values is not None}
            keywords = [missing | {name: row[name] for name in row if takes_any or name in names} for row in rows]
            columns: Sequence[Sequence[Any]] = *texts, keywords
            places: Sequence[int] = range(count)
            if item.tasks is not None:
                places = [place for place, row in enumerate(rows) if row.get("task") in item.tasks]
                columns = [[column[place] for place in places] for column in columns]
            calls.append((item, places, runner.submit(*columns) if places else None))
        return calls

    def _join(self, count: int, calls: Sequence[_Call]) -> Answers:
        """Joins the answers of all functions to one per sample: `SampleReward`, or the first `Failed`."""
        parts: list[dict[str, float]] = [{} for _ in range(count)]
        failed: dict[int, Failed] = {}
        for item, places, future in calls:
            for place, answer in zip(places, future.result() if future else (), strict=True):
                if isinstance(answer, Failed):
                    failed.setdefault(place, answer)
                else:
                    parts[place] |= _named(item.name, answer)
        return [failed.get(place) or self._weighted(sample) for place, sample in enumerate(parts)]

    def _weighted(self, parts: dict[str, float]) -> SampleReward:
        weighted = [self._weights.get(name, 1.0) * part for name, part in parts.items() if not math.isnan(part)]
        if not weighted:
            return SampleReward(None if self._functions else 0.0, parts)
        parts.pop("", None)  # a single number is the reward itself
        return SampleReward(math.fsum(weighted), parts)


def _named(name: str, answer: float | dict[str, float] | None) -> dict[str, float]:
    """Returns the parts of an answer by full name; a number is the part `name`."""
    if not isinstance(answer, dict):
        return {} if answer is None else {name: answer}
    return {f"{name}/{key}" if name else key: value for key, value in answer.items()}


def rewards_of(answers: Answers) -> Rewards:
    """Converts the answers of a `RewardRunner` to rewards."""
    messages = [answer.message for answer in answers if isinstance(answer, Failed)]
    rewards = [SampleReward(None) if isinstance(answer, Failed) else answer for answer in answers]
    names = dict.fromkeys(name for item in rewards for name in item.parts)
    return Rewards(
        np.array([item.value or 0.0 for item in rewards], np.float32),
        np.array([item.value is not None for item in rewards], np.bool_),
        messages[0] if messages else "",
        sum(isinstance(answer, SampleReward) and answer.value is None for answer in answers),
        {name: np.array([item.parts.get(name, np.nan) for item in rewards], np.float32) for name in names},
    )


def join_rewards(parts: Sequence[Rewards]) -> Rewards:
    """Concatenates rewards."""
    messages = [part.message for part in parts if part.message]
    values = np.concatenate([part.values for part in parts] or [np.zeros(0, np.float32)])
    answered = np.concatenate([part.answered for part in parts] or [np.zeros(0, np.bool_)])
    names = dict.fromkeys(name for part in parts for name in part.parts)
    columns = {
        name: np.concatenate([part.parts.get(name, np.full(len(part.values), np.nan, np.float32)) for part in parts])
        for name in names
    }
    return Rewards(values, answered, messages[0] if messages else "", sum(part.excluded for part in parts), columns)


def check_failures(section: str, failed: int, total: int, message: str, limit: float, *, may_all_fail: bool = False) -> None:
    """Warns of failed samples, or raises RunError if their share exceeds the `limit`, `<section>.max_failed_share`.

    Also raises if all samples failed, unless `may_all_fail`. A training step has several samples, so then the function is
    broken and there is nothing to learn. A validation may have a single sample, and the run can continue without it.
    """
    if failed and failed == total and not may_all_fail:
        raise RunError(f"{section} failed for all {total} samples: {message}")
    if failed > limit * total:
        raise RunError(
            f"{section} failed for {failed} of {total} samples, more than {section}.max_failed_share = {limit:g}: {message}"
        )
    if failed:
        logger.warning("%s failed for %d of %d samples: %s", section, failed, total, message)


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

    A reference is an answer (`72`, `\\frac{1}{2}`) or a GSM8K solution with a number after `####`, also with its unit. The
    completion's answer is in the last `\\boxed{}`, or else its last expression or number. Several boxes may also give the
    elements of a set. Needs `dagrl[math]`.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns at each call that its timeouts are off
    # The runner has deadlines. math-verify's own use signals, which work only in a main thread.
    read = partial(parse, parsing_timeout=None)

    def gold(reference: str) -> list[Any]:
        _, mark, final = reference.rpartition("####")
        return (read(final.replace(",", "")) if mark else []) or read(f"${final.strip()}$")

    def is_right(completion: str, reference: str) -> bool:
        answers = {completion, completion[max(completion.rfind(r"\boxed"), 0) :]}  # math-verify makes a set of all boxes
        return any(verify(gold(reference), read(answer), timeout_seconds=None) for answer in answers)

    return [float(is_right(*pair)) for pair in zip(completions, references, strict=True)]


math_answer.requires = ("math_verify",)  # type: ignore[attr-defined]  # checked before a run starts


def _checked(answer: Any) -> float | dict[str, float] | None:
    if answer is None:
        return None
    if isinstance(answer, Mapping):
        return {str(name): math.nan if value is None else _number(value) for name, value in answer.items()}
    return _number(answer)


def _number(answer: Any) -> float:
    try:
        reward = float(answer)
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"it returned a reward that is not a number: {error}") from error
    if not abs(reward) <= MAX_FLOAT32:
        raise ValueError("it returned a reward that is not finite in float32")
    return reward
