"""The process that runs a user's function: `python -m dagrl.function_process FD module:function KEY batched|single
TIMEOUT_S TIMEOUT_KEY`.

Started by `dagrl.function_runner`. It says first why it cannot import the function, or None. It answers every list of
columns on the connection `FD` with one answer a row, or with a text that says what the function raised (both pickled), and
ends when the other end is closed or its parent dies. A coroutine function is awaited; one that takes single rows is awaited
for all rows of a call at once, each under the deadline. All calls have one event loop: a client or a semaphore that the
function keeps is bound to it. Tasks that it leaves behind are cancelled with the call.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import pickle
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from dagrl.deadline import Deadline
from dagrl.errors import UserError, error_text
from dagrl.function_runner import Failed, Item, is_coroutine
from dagrl.imports import load_callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve until the connection is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor, path, key, how, timeout_s, timeout_key = sys.argv[1:]
    with Connection(int(descriptor)) as connection, asyncio.Runner() as runner:
        try:
            function = load_callable(path, key)
        except UserError as error:
            connection.send(str(error))
            return
        connection.send(None)
        answers = _answers(how, function, Deadline(float(timeout_s), timeout_key))
        while True:
            try:
                columns = connection.recv()
            except EOFError:
                return
            connection.send_bytes(_pickled(answers(runner, function, columns)))


def _answers(how: str, function: Callable[..., Any], deadline: Deadline) -> Callable[..., list[Any] | str]:
    """What answers the columns of a call."""
    if how == "batched":
        return answer_batch
    return partial(answer_singly, deadline=deadline) if is_coroutine(function) else answer_row


def _pickled(answers: list[Any] | str) -> bytes:
    """Answers as plain data, whatever the function's module has told `multiprocessing` of sharing memory (torch does)."""
    try:
        return pickle.dumps(answers)
    except Exception as error:
        return pickle.dumps(f"its answer cannot be pickled: {error_text(error)}")


def answer_batch(runner: asyncio.Runner, function: Callable[..., Any], columns: Sequence[list[str]]) -> list[Any] | str:
    """The function's answers to all rows at once, or what it raised."""
    try:
        return list(_result(runner, function, columns))
    except Exception as error:
        return error_text(error)


def answer_row(runner: asyncio.Runner, function: Callable[..., Any], columns: Sequence[list[str]]) -> list[Any] | str:
    """The answer to the only row, or what the function raised, which is no coroutine function: it may run its own loop."""
    (row,) = zip(*columns, strict=True)
    try:
        return [_result(runner, function, row)]
    except Exception as error:
        return error_text(error)


def _result(runner: asyncio.Runner, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    result = function(*arguments)
    return _run(runner, _awaited(result)) if inspect.isawaitable(result) else result


def answer_singly(
    runner: asyncio.Runner, function: Callable[..., Any], columns: Sequence[list[str]], deadline: Deadline
) -> list[Any] | str:
    """One answer a row, or a `Failed`; coroutines of all rows run side by side, and end at the deadline one by one."""
    return _run(runner, _gather(function, list(zip(*columns, strict=True)), deadline))


def _run(runner: asyncio.Runner, call: Coroutine[Any, Any, Item]) -> Item:
    """The call's result, with no task of it left: the next call finds the loop as this one did."""
    try:
        return runner.run(call)
    finally:
        runner.run(_end_tasks())


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _gather(function: Callable[..., Any], rows: Sequence[tuple[str, ...]], deadline: Deadline) -> list[Any]:
    return list(await asyncio.gather(*(_one(function, row, deadline) for row in rows)))


async def _one(function: Callable[..., Any], row: tuple[str, ...], deadline: Deadline) -> Any:
    limit = asyncio.timeout(deadline.seconds)
    try:
        async with limit:
            result = function(*row)
            return await result if inspect.isawaitable(result) else result
    except Exception as error:
        if limit.expired():
            return Failed(deadline.missed)
        return Failed(error_text(error))


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main()
