"""Runs a user's function in several processes, and retries the rows of a failed batch alone.

with FunctionRunner("my_task:reward", "reward", config.reward, check, arguments="named") as runner:
    future = runner.submit(prompts, completions, references, keywords)  # answered in one of `num_workers` processes
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from dagrl.config import FunctionConfig, ProcessConfig
from dagrl.errors import ConfigError
from dagrl.imports import load_callable
from dagrl.rl.functions.answers import Answers, Failed, is_coroutine
from dagrl.rl.functions.process import Arguments, FunctionProcess, LoopThread
from dagrl.runtime.deadline import Deadline

logger = logging.getLogger(__name__)

CALL_TIMEOUTS = 4
"""Deadline of a whole call, as a multiple of `timeout_s`."""

MIN_SHARE = 0.1
"""Least time of a retried row, as a fraction of `timeout_s`."""


def check_concurrency(function: Callable[..., Any], key: str, batched: bool, concurrency: int | None) -> None:
    """Raises ConfigError if a limit is set for a function whose calls never run at once. `key` is that of the function."""
    if concurrency is not None and (batched or not is_coroutine(function)):
        section = key.removesuffix(".function")
        raise ConfigError(
            f"{section}.max_concurrency is {concurrency}, but {section}.function is not a coroutine function of single "
            f"samples; write `async def` and set {section}.batched=false, or leave max_concurrency out"
        )


class FunctionRunner:
    """A function in `num_workers` processes. They start and end with the context."""

    def __init__(
        self,
        path: str,
        section: str,
        config: ProcessConfig,
        check: Callable[[Any], Any],
        *,
        arguments: Arguments,
        prepare: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ConfigError if the import path, `<section>.function`, is wrong. `config` is that section.

        `arguments` says how rows are passed: `named` (the last column has keyword arguments), or `episodes` (to an
        `EpisodeHost`). `check` converts an answer, or raises ValueError or TypeError that says what is wrong with it.
        `prepare` has the arguments of the function's own `prepare`, if it has one, which a new process calls.
        """
        key = f"{section}.function"
        self.function, self._key, self._check = load_callable(path, key), key, check
        batched, concurrency = isinstance(config, FunctionConfig) and config.batched, config.max_concurrency
        if arguments != "episodes":
            check_concurrency(self.function, key, batched, concurrency)
        self._warned: set[str] = set()
        self._row_by_row = not batched and arguments != "episodes" and not is_coroutine(self.function)
        self._deadline = Deadline(config.timeout_s, f"{section}.timeout_s")
        self._whole = None if self._row_by_row else self._deadline.times(CALL_TIMEOUTS)
        start = Deadline(config.start_timeout_s, f"{section}.start_timeout_s")
        self._processes = [
            FunctionProcess(path, key, batched, self._deadline, start, arguments, concurrency, prepare)
            for _ in range(config.num_workers)
        ]
        self._idle: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        for process in self._processes:
            self._idle.put_nowait(process)
        self._loop = LoopThread(key)

    def __enter__(self) -> Self:
        """Starts the processes in the background. If one cannot start, the first call that uses it says why."""
        self._loop.start()
        for process in self._processes:
            self._loop.spawn(process.start())
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the processes. Pending calls are answered with failures."""
        for process in self._processes:
            self._loop.run(process.close())

    def submit(self, *columns: Sequence[Any]) -> Future[Answers]:
        """Starts a call, which returns one answer per row. `dagrl.rl.functions` says how long it may take."""
        return self._loop.spawn(self._answers(columns))

    async def _answers(self, columns: Sequence[Sequence[Any]]) -> Answers:
        process = await self._idle.get()
        try:
            await process.start()
            until = time.monotonic() + self._whole.seconds if self._whole else math.inf
            if self._row_by_row:
                return await self._one_by_one(process, columns, until)
            answers = await process.ask(columns)
            answers = self._checked(answers, len(columns[0])) if not isinstance(answers, str) else answers
            if not isinstance(answers, str):
                return answers
            if len(columns[0]) == 1:  # not retried: that would repeat the same call, with its time and side effects
                return [Failed(answers)]
            alone = await self._one_by_one(process, columns, until)
            if answers not in self._warned and not any(isinstance(answer, Failed) for answer in alone):
                self._warned.add(answers)
                text = "%s fails for a batch but answers each of its rows alone, which takes longer: %s (warned once)"
                logger.warning(text, self._key, answers)
            return alone
        finally:
            self._idle.put_nowait(process)

    async def _one_by_one(self, process: FunctionProcess, columns: Sequence[Sequence[Any]], until: float) -> Answers:
        """Returns one answer per row, giving each remaining row an equal share of the time left `until` (`time.monotonic`).

        The share leaves room for process restarts at the rate seen so far, but is at least `MIN_SHARE` of `timeout_s`.
        """
        answers: Answers = []
        rows = list(zip(*columns, strict=True))
        starts_s = 0.0
        for index, row in enumerate(rows):
            began = time.monotonic()
            if began < until:
                await process.start()  # if the last row lost it
            now = time.monotonic()
            left_s, starts_s = until - now, starts_s + (now - began if index else 0.0)
            if left_s <= 0:
                assert self._whole is not None
                answers.append(Failed(f"not retried alone within {self._whole.key} = {self._whole.seconds:g} s"))
                continue
            share_s = max(left_s / (len(rows) - index) - starts_s / max(index, 1), MIN_SHARE * self._deadline.seconds)
            limit = None
            if self._whole is not None and min(share_s, left_s) < self._deadline.seconds:
                limit = Deadline(round(min(share_s, left_s), 3), f"its share of {self._whole.key}")
            answer = await process.ask([[value] for value in row], limit)
            answer = answer if isinstance(answer, str) else self._checked(answer, 1)
            answers.append(Failed(answer) if isinstance(answer, str) else answer[0])
        return answers

    def _checked(self, answers: Answers, rows: int) -> Answers | str:
        if len(answers) != rows:
            return f"it returned {len(answers)} answers; expected: a list of {rows}"
        try:
            return [answer if isinstance(answer, Failed) else self._check(answer) for answer in answers]
        except (TypeError, ValueError) as error:
            return str(error)
