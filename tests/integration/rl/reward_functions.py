"""Reward functions that misbehave. Imported by their processes, so only what these need is imported."""

import asyncio
import multiprocessing.reduction
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any


def length(prompts: Any, completions: Any, references: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def picky(prompts: Any, completions: Any, references: Any) -> list[float]:
    for completion in completions:
        if completion == "hang":
            re.fullmatch(r"(a+)+b", "a" * 60)  # holds the GIL for hours
        if completion == "die":
            os._exit(3)
    return length(prompts, completions, references)


def noted(prompts: Any, completions: Any, references: Any) -> list[float]:
    with Path(prompts[0]).open("a") as file:
        file.write(completions[0] + "\n")
    return picky(prompts, completions, references)


def pid(prompts: Any, completions: Any, references: Any) -> list[float]:
    return [float(os.getpid())] * len(prompts)


def pid_with_a_daemon(prompts: Any, completions: Any, references: Any) -> list[float]:
    """The daemon cannot be traced to this process, and holds the connection."""
    if child := os.fork():
        os.waitpid(child, 0)
        return pid(prompts, completions, references)
    os.setsid()
    if not os.fork():
        time.sleep(10.0)
    os._exit(0)


def steady(prompt: str, completion: str, reference: str) -> float:
    with Path(prompt).open("a") as file:
        file.write(completion)
    time.sleep(3600 if completion == "hang" else 0.25)
    return float(len(completion))


def meet(prompts: Any, completions: Any, references: Any) -> list[float]:
    (Path(prompts[0]) / str(os.getpid())).touch()
    while len(os.listdir(prompts[0])) < 2:
        time.sleep(0.01)
    return [1.0] * len(prompts)


def side_by_side(prompt: str, completion: str, reference: str) -> float:
    """Ends when four processes run it."""
    (Path(prompt) / str(os.getpid())).touch()
    while len(os.listdir(prompt)) < 4:
        time.sleep(0.01)
    return 1.0


def sandboxed(prompts: Any, completions: Any, references: Any) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=completions[0] == "own")
    Path(prompts[0]).write_text(str(child.pid))
    child.wait()


left_behind: list[asyncio.Task[None]] = []


async def leaves_tasks(prompts: Any, completions: Any, references: Any) -> list[float]:
    ended = [float(task.cancelled()) for task in left_behind] or [0.0]
    left_behind.append(asyncio.create_task(asyncio.sleep(3600)))
    return ended[-1:]


class Odd:
    """An answer that is a number, or raises."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __float__(self) -> float:
        if self.fails:
            raise RuntimeError("not a number after all")
        return 2.0


class OneWay(Odd):
    def __reduce__(self) -> Any:
        return cannot_be_rebuilt, (1,)


def cannot_be_rebuilt(value: int) -> None:
    raise KeyError("not here")


class Shared(Odd):
    """`multiprocessing` would pickle it in a way of its own, as it does with torch tensors."""


multiprocessing.reduction.ForkingPickler.register(Shared, lambda value: (cannot_be_rebuilt, (1,)))


def odd(prompts: Any, completions: Any, references: Any) -> list[Any]:
    kinds: dict[str, Any] = {
        "rebuilt": lambda: OneWay(False),
        "pickled": lambda: lambda: 1.0,
        "number": lambda: Odd(True),
        "shared": lambda: Shared(False),
    }
    return [kinds.get(completion, lambda: Odd(False))() for completion in completions]
