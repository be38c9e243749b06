"""`sys.exit` in a user's code, such as a program that the policy wrote, costs its row alone: the process goes on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from dagrl.config import EnvironmentConfig
from dagrl.rl.functions.agent_pool import AgentPool
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.process import Arguments, FunctionProcess
from dagrl.runtime.deadline import Deadline

EXITS = """
import os, sys

def one(what):
    exec(what)
    return os.getpid()

def batch(programs):
    return [one(program) for program in programs]

def lazily(programs):
    return map(one, programs)

async def batch_of_a_coroutine(programs):
    return batch(programs)

async def coroutine(program):
    return one(program)

class Environment:
    def reset(self, example):
        pass

    def step(self, completion):
        return str(one(completion))

class AsyncEnvironment(Environment):
    async def step(self, completion):
        return str(one(completion))

def agent(example, endpoint):
    return one(example["program"])

async def async_agent(example, endpoint):
    return one(example["program"])
"""
BAD, GOOD = "import sys; sys.exit(3)", "pass"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "exits_of_test.py").write_text(EXITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "exits_of_test"


def turn(text: str) -> dict[str, Any]:
    return {"turns": [text], "arguments": {}, "example": {}}


@pytest.mark.parametrize(
    "name, batched, arguments",
    [
        ("batch", True, "named"),
        ("lazily", True, "named"),
        ("batch_of_a_coroutine", True, "named"),
        ("one", False, "named"),
        ("coroutine", False, "named"),
        ("Environment", False, "episodes"),
        ("AsyncEnvironment", False, "episodes"),
    ],
)
def test_a_function_that_exits_fails_for_its_row(module: str, name: str, batched: bool, arguments: Arguments) -> None:
    deadline = Deadline(20.0, "reward.timeout_s")

    async def asked() -> list[Any]:
        process = FunctionProcess(f"{module}:{name}", "reward.function", batched, deadline, deadline, arguments)
        try:
            return [
                await process.ask([[program], [turn(program) if arguments == "episodes" else {}]])
                for program in (GOOD, BAD, GOOD)
            ]
        finally:
            await process.close()

    before, failed, after = asyncio.run(asked())
    message = failed if isinstance(failed, str) else failed[0].message
    assert message.startswith("RuntimeError: it called sys.exit(3) (") and message.endswith("exits_of_test.py, line 5)")
    assert before == after and int(before[0]) != os.getpid()


@pytest.mark.parametrize("name", ["agent", "async_agent"])
def test_an_agent_that_exits_fails_for_its_episode(module: str, name: str) -> None:
    pool = AgentPool(f"{module}:{name}", EnvironmentConfig())
    pool.start()
    endpoint = {"base_url": "", "api_key": "", "model": ""}
    try:
        requests = [
            {"example": {"program": one}, "endpoint": endpoint} for one in ("import time; time.sleep(1.0)", BAD, GOOD)
        ]
        slow, bad, good = (pool.submit(str(place), request).result for place, request in enumerate(requests))
        failed = bad(30.0)
        assert isinstance(failed, Failed) and failed.message.startswith("RuntimeError: it called sys.exit(3)")
        assert slow(30.0) == good(30.0), "the same process"
    finally:
        pool.close()
