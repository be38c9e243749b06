"""Runs a user's function in several processes, and retries the rows of a failed batch alone.

with FunctionRunner("my_task:reward", "reward", config.reward, check, arguments="named") as runner:
    future = runner.submit(prompts, completions, references, keywords)  # answered in one of `num_workers` processes
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from dagrl.config import FunctionConfig, ProcessConfig
from dagrl.errors import ConfigError
from dagrl.imports import load_callable
from dagrl.rl.functions.answers import Answers, Failed, is_coroutine
from dagrl.rl.functions.process import Arguments, Columns, FunctionProcess, LoopThread
from dagrl.runtime.deadline import MISSED, Deadline

logger = logging.getLogger(__name__)

MOST_PROCESSES = 4  # processes of a slow plain function of single rows, if `num_workers` does not say
SLOW_S = 1.0  # a row that waits this long for a process gets a further one
TOGETHER_S = 0.01  # calls that take less, all together, share a message to their process


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
        retries: bool = True,
    ) -> None:
        """Raises ConfigError if the import path, `<section>.function`, is wrong. `config` is that section.

        `arguments` says how rows are passed: `named` (the last column has keyword arguments), or `episodes` (to an
        `EpisodeHost`). `check` converts an answer, or raises ValueError or TypeError that says what is wrong with it.
        `prepare` has the arguments of the function's own `prepare`, if it has one, which a new process calls. Without
        `retries` all rows of a failed batch fail.
        """
        key = f"{section}.function"
        self.function, self._key, self._check = load_callable(path, key), key, check
        batched, concurrency = isinstance(config, FunctionConfig) and config.batched, config.max_concurrency
        if arguments != "episodes":
            check_concurrency(self.function, key, batched, concurrency)
        self._warned: set[str] = set()
        self._asked = self._late = 0  # calls, and those without an answer in time
        self._retries = retries
        self._row_by_row = not batched and arguments != "episodes" and not is_coroutine(self.function)
        self._deadline = Deadline(config.timeout_s, f"{section}.timeout_s")
        start = Deadline(config.start_timeout_s, f"{section}.start_timeout_s")
        started = config.num_workers or 1
        most = MOST_PROCESSES if self._row_by_row and config.num_workers is None else started
        self._processes = [
            FunctionProcess(path, key, batched, self._deadline, start, arguments, concurrency, prepare) for _ in range(most)
        ]
        self._spare = self._processes[started:]
        self._idle: asyncio.LifoQueue[FunctionProcess] = asyncio.LifoQueue()
        for process in self._processes[:started]:
            self._idle.put_nowait(process)
        self._shares = started == 1 and batched and arguments == "named"  # messages
        self._waiting, self._working = deque[tuple[Columns, Future[Answers]]](), False
        self._lock, self._call_s = threading.Lock(), math.inf  # seconds that a call took last
        self._loop = LoopThread(key)

    def __enter__(self) -> Self:
        """Starts the processes in the background. If one cannot start, the first call that uses it says why."""
        self._loop.start()
        for process in self._processes[: len(self._processes) - len(self._spare)]:
            self._loop.spawn(process.start())
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the processes. Pending calls are answered with failures."""
        for process in self._processes:
            self._loop.run(process.close())

    def submit(self, *columns: Sequence[Any]) -> Future[Answers]:
        """Starts a call, which returns one answer per row. `dagrl.rl.functions` says how long it may take."""
        if not self._shares:
            return self._loop.spawn(self._answers(columns))
        future = Future[Answers]()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._lock:
            self._waiting.append((columns, future))
            starts, self._working = not self._working, True
        if starts:
            self._loop.spawn(self._work())
        return future

    async def _work(self) -> None:
        """Answers the calls that wait, until none does."""
        while calls := self._next_calls():
            begun, asked = time.monotonic(), [columns for columns, _ in calls]
            try:
                together = await self._processes[0].ask_together(asked) if len(calls) > 1 else None
                for number, (columns, future) in enumerate(calls):
                    future.set_result(await self._answers(columns, together[number] if together else None))
            except BaseException as error:  # passed on to the readers of the futures
                for _, future in calls:
                    if not future.done():
                        future.set_exception(error)
            self._call_s = (time.monotonic() - begun) / len(calls)

    def _next_calls(self) -> list[tuple[Columns, Future[Answers]]]:
        with self._lock:
            most = max(1, int(TOGETHER_S / max(self._call_s, 1e-6)))
            calls = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._working = bool(calls)
            return calls

    async def _answers(self, columns: Columns, answered: Answers | str | None = None) -> Answers:
        """Returns one answer per row; `answered` is what the process has said already."""
        if self._row_by_row:
            await self._processes[0].start()  # so that rows are slow by themselves
            return await self._one_by_one(columns)
        if answered is None:
            process = await self._idle.get()
            try:
                answered = await process.ask(columns)
            finally:
                self._idle.put_nowait(process)
        answers = self._judged(answered, len(columns[0]))
        if not isinstance(answers, str):
            return answers
        if len(columns[0]) == 1 or not self._retries:  # one would be the same call again, with its side effects
            return [Failed(answers)] * len(columns[0])
        alone = await self._one_by_one(columns)
        if answers not in self._warned and not any(isinstance(answer, Failed) for answer in alone):
            self._warned.add(answers)
            text = "%s fails for a batch but answers each of its rows alone, which takes longer: %s (warned once)"
            logger.warning(text, self._key, answers)
        return alone

    async def _one_by_one(self, columns: Columns) -> Answers:
        return list(await asyncio.gather(*[self._alone(row) for row in zip(*columns, strict=True)]))

    async def _alone(self, row: Sequence[Any]) -> Any:
        """Returns the answer to a row, under the deadline, in an idle process, or after a while in a spare one."""
        waiting = asyncio.create_task(self._idle.get())
        done, _ = await asyncio.wait([waiting], timeout=SLOW_S)
        if not done and self._spare:
            self._idle.put_nowait(self._spare.pop(0))
        process = await waiting
        try:
            answer = self._judged(await process.ask([[value] for value in row]), 1)
            return Failed(answer) if isinstance(answer, str) else answer[0]
        finally:
            self._idle.put_nowait(process)

    def _judged(self, answers: Answers | str, rows: int) -> Answers | str:
        """Returns the checked answers, or what went wrong. Warns of missed deadlines as soon as they are missed."""
        messages = [answers] if isinstance(answers, str) else [item.message for item in answers if isinstance(item, Failed)]
        late = [message for message in messages if message.startswith(MISSED)]
        self._asked += 1 if isinstance(answers, str) else len(answers)
        before, self._late = self._late, self._late + len(late)
        if self._late.bit_length() > before.bit_length():  # the first, the second, the fourth, ...
            logger.warning("%s: %d of %d calls so far had %s", self._key, self._late, self._asked, late[-1])
        return answers if isinstance(answers, str) else self._checked(answers, rows)

    def _checked(self, answers: Answers, rows: int) -> Answers | str:
        if len(answers) != rows:
            return f"it returned {len(answers)} answers; expected: a list of {rows}"
        try:
            return [answer if isinstance(answer, Failed) else self._check(answer) for answer in answers]
        except (TypeError, ValueError) as error:
            return str(error)
