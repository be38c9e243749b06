"""Reward functions, and the process that runs one of them under a deadline.

A reward function takes `(prompts, completions, references)`, three lists of texts of one length, and returns one float each.
It runs in a process of its own: one that hangs (a regular expression can, holding the interpreter's lock) is killed, and
one that raises costs the sample it raised for. Both are counted.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from dagrl.config import RewardConfig
from dagrl.errors import RunError
from dagrl.imports import load_callable

logger = logging.getLogger(__name__)

RewardFunction = Callable[[list[str], list[str], list[str]], list[float]]
FloatArray = npt.NDArray[np.float32]
Rows = tuple[Sequence[str], Sequence[str], Sequence[str]]

MOST_LOSSES = 3
"""Samples of one call that may hang or end the process before the rest of the call counts as failed."""

START_S = 60.0
"""Seconds within which the process has imported the function."""


def exact_match(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """1 where the completion is the reference, spaces around it aside, and 0 elsewhere."""
    return [float(given.strip() == wanted.strip()) for given, wanted in zip(completions, references, strict=True)]


@dataclass(frozen=True)
class Rewards:
    """One reward a sample, 0 for those that failed, and the number of failures with the first one's message."""

    values: FloatArray  # [n]
    failed: int = 0
    message: str = ""


def shuffled(rewards: FloatArray, seed: int, step: int) -> FloatArray:
    """The rewards [n] dealt out to other samples at random: the control of a run that must not learn."""
    return np.random.default_rng((seed, step)).permutation(rewards)


class RewardRunner:
    """Runs the configured function in a process that starts with the first call and ends with `close`."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError when the import path leads nowhere."""
        load_callable(config.function, "reward.function")
        self._function = config.function
        self._timeout_s = config.timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]) -> Rewards:
        """Rewards [n] of n samples. The whole list goes to the function at once; one sample at a time only if that fails.

        Raises RunError when it fails for every sample, as the function itself is then at fault.
        """
        rows = (prompts, completions, references)
        whole = self._ask(rows)
        answers = self._one_by_one(rows, whole) if isinstance(whole, str) else whole
        values = np.array([0.0 if isinstance(answer, str) else answer for answer in answers], np.float32)
        messages = [answer for answer in answers if isinstance(answer, str)]
        if messages and len(messages) == len(answers):
            raise RunError(f"reward.function {self._function} failed for all {len(answers)} samples: {messages[0]}")
        if messages:
            logger.warning("reward.function failed for %d of %d samples: %s", len(messages), len(answers), messages[0])
        return Rewards(values, len(messages), messages[0] if messages else "")

    def close(self) -> None:
        """End the process; nothing happens when there is none."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _one_by_one(self, rows: Rows, failure: str) -> Sequence[float | str]:
        answers: list[float | str] = []
        losses = 0
        for row in zip(*rows, strict=True):
            if losses >= MOST_LOSSES:
                answers.append(failure)
                continue
            prompt, completion, reference = row
            answer = self._ask(([prompt], [completion], [reference]))
            losses += self._connection is None
            answers.append(answer if isinstance(answer, str) else answer[0])
        return answers

    def _ask(self, rows: Rows) -> list[float] | str:
        """The rewards of all rows, or what went wrong."""
        try:
            connection = self._running()
            connection.send([list(texts) for texts in rows])
            if not connection.poll(self._timeout_s):
                self.close()
                return f"no answer within reward.timeout_s = {self._timeout_s:g} s"
            answer = connection.recv()
        except (EOFError, OSError):
            self.close()
            return "the process that runs it ended"
        return answer if isinstance(answer, str) else _checked(answer, len(rows[0]))

    def _running(self) -> Connection:
        """The connection to a process that has imported the function."""
        if self._connection is None:
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "dagrl.reward_process", str(theirs.fileno()), self._function]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            self._process = subprocess.Popen(  # noqa: S603  # our own module, with the user's import path
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            theirs.close()
            self._connection = ours
            if not ours.poll(START_S):
                self.close()
                raise RunError(f"reward.function {self._function} was not imported within {START_S:g} s")
            ours.recv()
        return self._connection


def _checked(answer: object, samples: int) -> list[float] | str:
    """The rewards, or what is wrong with them."""
    if not isinstance(answer, list) or len(answer) != samples:
        found = f"{len(answer)} rewards" if isinstance(answer, list) else repr(answer)[:60]
        return f"it returned {found}; expected: a list of {samples} numbers"
    try:
        rewards = [float(reward) for reward in answer]
    except (TypeError, ValueError) as error:
        return f"it returned a reward that is no number: {error}"
    return rewards if all(map(math.isfinite, rewards)) else "it returned a reward that is not finite"
