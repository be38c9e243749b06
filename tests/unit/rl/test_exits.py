"""`sys.exit` in a user's code, such as a program that the policy wrote, fails its row, and the process continues."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from dagrl.rl.functions.agents import AgentHost
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.process import LoopThread
from dagrl.runtime.deadline import Deadline
from tests.unit.rl.in_process import InProcess

DEADLINE = Deadline(20.0, "reward.timeout_s")


def one(what: str) -> str:
    if what == "exits":
        sys.exit(3)
    return what


def batch(texts: list[str]) -> list[str]:
    return [one(text) for text in texts]


def lazily(texts: list[str]) -> Iterator[str]:
    return map(one, texts)


async def batch_of_a_coroutine(texts: list[str]) -> list[str]:
    return batch(texts)


async def coroutine(text: str) -> str:
    return one(text)


class Environment:
    def reset(self, example: object) -> None: ...

    def step(self, completion: str) -> Any:
        return one(completion)


class AsyncEnvironment(Environment):
    async def step(self, completion: str) -> str:
        return one(completion)


def agent(example: Mapping[str, str], endpoint: object) -> str:
    return one(example["text"])


async def async_agent(example: Mapping[str, str], endpoint: object) -> str:
    return one(example["text"])


def check(failure: str | Failed) -> None:
    message = failure.message if isinstance(failure, Failed) else failure
    line = one.__code__.co_firstlineno + 2
    assert message == f"RuntimeError: it called sys.exit(3) ({__file__}, line {line})"


@pytest.mark.parametrize(
    "name", ["batch", "lazily", "batch_of_a_coroutine", "one", "coroutine", *("Environment", "AsyncEnvironment")]
)
def test_a_function_that_exits_fails_for_its_row(name: str) -> None:
    arguments, batched = (
        "episodes" if "Environment" in name else "named",
        name in ("batch", "lazily", "batch_of_a_coroutine"),
    )
    process = InProcess(f"{__name__}:{name}", "reward.function", batched, DEADLINE, DEADLINE, arguments)

    async def asked(text: str) -> Any:
        turn = {"turns": [text], "arguments": {}, "example": {}}
        return await process.ask([[text], [turn if arguments == "episodes" else {}]])

    async def in_order() -> list[Any]:
        return [await asked(text) for text in ("before", "exits", "after")]

    before, failed, after = asyncio.run(in_order())
    check(failed if isinstance(failed, str) else failed[0])
    assert (before, after) == (["before"], ["after"])


@pytest.mark.parametrize("function", [agent, async_agent])
def test_an_agent_that_exits_fails_for_its_episode(function: Any) -> None:
    answers: dict[int, Future[Any]] = {number: Future() for number in range(2)}
    loop = LoopThread("agents")
    loop.start()
    host = AgentHost(function, DEADLINE, loop.spawn, lambda number, answer: answers[number].set_result(answer))
    for number, text in enumerate(("exits", "goes on")):
        host(number, {"example": {"text": text}, "endpoint": {"base_url": "", "api_key": "", "model": ""}})
    failed, fine = (future.result(20.0) for future in answers.values())
    loop.stop()
    check(failed)
    assert fine == "goes on"
