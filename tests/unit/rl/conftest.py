"""A fixture that runs functions of users in the process of the test, where deadlines and lost processes do not matter."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dagrl.imports import load_callable
from dagrl.rl.functions.answers import is_coroutine
from dagrl.rl.functions.child import answer_singly, answer_together
from dagrl.rl.functions.episodes import EpisodeHost
from dagrl.rl.functions.keywords import with_keywords
from dagrl.rl.functions.process import LoopThread
from dagrl.rl.rewards import RewardRunner, Rewards, rewards_of
from dagrl.runtime.deadline import Deadline


class InProcess:
    """A test double of `FunctionProcess`, which calls the function as its child process would."""

    def __init__(self, path: str, key: str, batched: bool, deadline: Deadline, start: Deadline, *more: Any) -> None:
        (arguments, concurrency, *_), function = (*more, None), load_callable(path, key)
        self._function = EpisodeHost(function) if arguments == "episodes" else with_keywords(function, batched=batched)
        self._batched, self._deadline, self._concurrency = batched, deadline, concurrency or 0
        self._loop = LoopThread(key)
        self._loop.start()

    async def start(self) -> None:
        """Starts nothing."""

    async def ask(self, columns: Sequence[Sequence[Any]]) -> list[Any] | str:
        """Calls the function. Coroutines run in the loop of the runner, which all calls share."""
        given = [list(column) for column in columns]
        if is_coroutine(self._function) and not self._batched:
            return await answer_singly(self._function, given, self._deadline, self._concurrency)
        return await asyncio.to_thread(answer_together, self._loop, self._function, given, batched=self._batched)

    async def ask_together(self, calls: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any] | str]:
        """Asks one by one."""
        return [await self.ask(columns) for columns in calls]

    async def close(self) -> None:
        """Ends nothing."""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the functions of rewards and environments in this process."""
    monkeypatch.setattr("dagrl.rl.functions.runner.FunctionProcess", InProcess)


def rewarded(runner: RewardRunner, *texts: Sequence[str]) -> Rewards:
    """Returns the rewards of samples, of which not too many may fail."""
    rewards = rewards_of(runner.submit(*texts).result())
    runner.check(rewards)
    return rewards
