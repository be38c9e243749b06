r"""The child process that runs a user's function:

    python -m dagrl.rl.functions.child FD module:function KEY batched|single named|episodes|agents CONCURRENCY \
        TIMEOUT_S TIMEOUT_KEY PREPARE

Started by `dagrl.rl.functions.process`, with which it talks over the socket `FD`:
- It first sends None, or why the function cannot be imported.
- For each number and list of columns that it receives, it sends the number with one pickled answer per row, or with a text
  that says what the function raised.
- It exits when the connection is closed or its parent dies.

With `named`, the last column has a dictionary per row, whose values are passed as keyword arguments. With `episodes`, the
function makes environments (`dagrl.rl.functions.episodes`). With `agents`, a message has the request of one episode, or None
to cancel it, and answers come in any order.

Coroutine functions are awaited. With `single`, the coroutines of all rows of a call run concurrently, at most CONCURRENCY
(0: all) at once, each under the deadline. All calls share one event loop, so the function may keep objects bound to it, such
as a client or a semaphore. Tasks that a call leaves behind are cancelled, except those of environments, whose loop also runs
between calls.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import inspect
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import IO, Any, TypeVar

from dagrl.errors import UserError, error_text
from dagrl.imports import load_callable
from dagrl.rl.functions.agents import AgentHost
from dagrl.rl.functions.answers import Failed, is_coroutine, raised, without_exit
from dagrl.rl.functions.episodes import EpisodeHost
from dagrl.rl.functions.keywords import with_keywords
from dagrl.rl.functions.process import BYTES, LoopThread
from dagrl.runtime.deadline import Deadline

Item = TypeVar("Item")

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serves calls until the connection is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        atexit.register(os.kill, os.getppid(), signal.SIGCONT)  # a parent that is stopped would not end
    descriptor, path, key, how, arguments, concurrency, timeout_s, timeout_key, prepare = sys.argv[1:]
    deadline, batched = Deadline(float(timeout_s), timeout_key), how == "batched"
    loop = LoopThread(arguments)
    loop.start()
    with socket.socket(fileno=int(descriptor)) as parent, parent.makefile("rb") as requests, asyncio.Runner() as own:
        try:
            function = load_callable(path, key)
            if arguments == "episodes" and hasattr(function, "prepare"):
                function.prepare(**json.loads(prepare))
        except UserError as error:
            _send(parent, str(error))
            return
        _send(parent, None)

        def reply(number: int, answer: Any) -> None:
            _send(parent, (number, _pickled(answer)))

        if arguments == "agents":
            _serve(requests, AgentHost(function, deadline, loop.spawn, reply))
            return
        function = EpisodeHost(function) if arguments == "episodes" else with_keywords(function, batched=batched)
        answers: Callable[..., Any] = answer_batch if batched else answer_row
        if is_coroutine(function) and not batched:
            answers = partial(answer_singly, deadline=deadline, concurrency=int(concurrency))
        runner = loop if arguments == "episodes" else own
        _serve(requests, lambda number, columns: reply(number, answers(runner, function, columns)))


def _serve(requests: IO[bytes], take: Callable[[int, Any], None]) -> None:
    while True:
        try:
            number, content = pickle.load(requests)  # noqa: S301  # from our parent
        except EOFError:
            return
        take(number, content)


def _send(parent: socket.socket, message: object) -> None:
    content = pickle.dumps(message)
    parent.sendall(BYTES.pack(len(content)) + content)


Runner = asyncio.Runner | LoopThread


def _pickled(answers: Any) -> bytes:
    """Pickles answers by value. `multiprocessing` would share torch tensors."""
    try:
        return pickle.dumps(answers)
    except Exception as error:
        return pickle.dumps(f"its answer cannot be pickled: {error_text(error)}")


def answer_batch(runner: Runner, function: Callable[..., Any], columns: Sequence[list[Any]]) -> list[Any] | str:
    """Calls the function with all rows. Returns its answers, or what it raised."""
    try:
        with without_exit():
            answers = _result(runner, function, columns)
            if isinstance(answers, Iterable):
                return list(answers)
    except Exception as error:
        return raised(error)
    return (
        f"it returned a {type(answers).__name__}; expected: a list of {len(columns[0])} answers. A function of one sample "
        "needs batched=false"
    )


def answer_row(runner: Runner, function: Callable[..., Any], columns: Sequence[list[Any]]) -> list[Any] | str:
    """Calls a plain function, which may run its own event loop, with the only row. Returns its answer, or what it raised."""
    (row,) = zip(*columns, strict=True)
    try:
        with without_exit():
            return [_result(runner, function, row)]
    except Exception as error:
        return raised(error)


def _result(runner: Runner, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    result = function(*arguments)
    return _run(runner, _awaited(result)) if inspect.isawaitable(result) else result


def answer_singly(
    runner: Runner,
    function: Callable[..., Any],
    columns: Sequence[list[Any]],
    deadline: Deadline,
    concurrency: int = 0,
) -> list[Any] | str:
    """Runs the coroutines of the rows concurrently, each under the deadline. Returns one answer or `Failed` per row."""
    rows = list(zip(*columns, strict=True))
    return _run(runner, _gather(function, rows, deadline, concurrency or max(len(rows), 1)))


def _run(runner: Runner, call: Coroutine[Any, Any, Item]) -> Item:
    """Returns the call's result. Cancels the tasks that a function's call leaves, so that the next finds a clean loop."""
    try:
        return runner.run(call)
    finally:
        if isinstance(runner, asyncio.Runner):
            runner.run(_end_tasks())


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _gather(
    function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], deadline: Deadline, concurrency: int
) -> list[Any]:
    turn = asyncio.Semaphore(concurrency)

    async def one(row: tuple[Any, ...]) -> Any:
        async with turn:
            return await _one(function, row, deadline)

    return list(await asyncio.gather(*map(one, rows)))


async def _one(function: Callable[..., Any], row: tuple[Any, ...], deadline: Deadline) -> Any:
    limit = asyncio.timeout(deadline.seconds)
    try:
        async with limit:
            with without_exit():
                result = function(*row)
                return await result if inspect.isawaitable(result) else result
    except Exception as error:
        return Failed(deadline.missed if limit.expired() else raised(error))


async def _awaited(result: Any) -> Any:
    with without_exit():
        return await result


if __name__ == "__main__":
    main()
