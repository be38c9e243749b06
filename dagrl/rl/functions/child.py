r"""The child process that runs a user's function:

    python -m dagrl.rl.functions.child FD TRACE_FD module:function KEY batched|single named|episodes|agents CONCURRENCY \
        TIMEOUT_S TIMEOUT_KEY PREPARE

Started by `dagrl.rl.functions.process`, with which it talks over the socket `FD`:
- It first sends None, or why the function cannot be imported.
- For each number and list of columns that it receives, it sends the number with one pickled answer per row, or with a text
  that says what the function raised. For a tuple of such lists it makes several calls, and sends a list of these.
- It exits when the connection is closed or its parent dies.
- Shortly before the deadline of a call it writes its traceback to the file `TRACE_FD`, even if the function holds the GIL.

With `named`, the last column has a dictionary per row, whose values are passed as keyword arguments. With `episodes`, the
function makes environments (`dagrl.rl.functions.episodes`). With `agents`, a message has the request of one episode, or None
to cancel it, and answers come in any order.

Coroutine functions are awaited. With `single`, the coroutines of all rows of a call run concurrently, at most CONCURRENCY
(0: all) at once, each under the deadline. All calls share one event loop, so the function may keep objects bound to it, such
as a client or a semaphore. Tasks that a call leaves behind are cancelled, except those of environments, whose loop also runs
between calls.
"""

import asyncio
import atexit
import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, TypeVar

from dagrl.errors import UserError, error_text
from dagrl.imports import load_callable
from dagrl.rl.functions.agents import AgentHost
from dagrl.rl.functions.answers import Failed, described, is_coroutine, place_of, without_exit
from dagrl.rl.functions.episodes import EpisodeHost
from dagrl.rl.functions.keywords import with_keywords
from dagrl.rl.functions.process import BYTES, LoopThread
from dagrl.runtime.deadline import Deadline

Item = TypeVar("Item")

PR_SET_PDEATHSIG = 1  # linux/prctl.h

TRACE_AT = 0.9  # fraction of the deadline after which a traceback is written


def main() -> None:
    """Serves calls until the connection is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        atexit.register(os.kill, os.getppid(), signal.SIGCONT)  # a parent that is stopped would not end
    descriptor, trace, path, key, how, arguments, concurrency, timeout_s, timeout_key, prepare = sys.argv[1:]
    deadline, batched = Deadline(float(timeout_s), timeout_key), how == "batched"
    loop = LoopThread(arguments)
    loop.start()
    with socket.socket(fileno=int(descriptor)) as parent, parent.makefile("rb") as requests:
        try:
            function = load_callable(path, key)
            if arguments == "episodes" and hasattr(function, "prepare"):
                function.prepare(**json.loads(prepare))
        except UserError as error:
            _send(parent, str(error))
            return
        _send(parent, None)

        def reply(number: int, answer: Any) -> None:
            with suppress(ConnectionError):  # the driver ends, as the next read finds
                _send(parent, (number, _pickled(answer)))

        if arguments == "agents":
            _serve(requests, AgentHost(function, deadline, loop.spawn, reply))
            return
        function = EpisodeHost(function) if arguments == "episodes" else with_keywords(function, batched=batched)
        singly = is_coroutine(function) and not batched
        limits = deadline, int(concurrency)

        def call(columns: Sequence[list[Any]]) -> list[Any] | str:
            if singly:
                answers: list[Any] | str = loop.run(answer_singly(function, columns, *limits))
            else:
                answers = answer_together(loop, function, columns, batched=batched)
            if arguments != "episodes" and loop.tasks:  # the next call finds a clean loop
                loop.run(_end_tasks())
            return answers

        def answer(number: int, content: Any) -> None:
            os.ftruncate(int(trace), 0)
            os.lseek(int(trace), 0, os.SEEK_SET)
            faulthandler.dump_traceback_later(TRACE_AT * deadline.seconds, file=int(trace))
            answers = [*map(call, content)] if isinstance(content, tuple) else call(content)
            faulthandler.cancel_dump_traceback_later()
            reply(number, answers)

        _serve(requests, answer)


def _serve(requests: IO[bytes], take: Callable[[int, Any], None]) -> None:
    while True:
        try:
            number, content = pickle.load(requests)  # noqa: S301  # from our parent
        except (EOFError, ConnectionError):
            return
        take(number, content)


def _send(parent: socket.socket, message: object) -> None:
    content = pickle.dumps(message)
    parent.sendall(BYTES.pack(len(content)) + content)


def _pickled(answers: Any) -> bytes:
    """Pickles answers by value. `multiprocessing` would share torch tensors."""
    try:
        return pickle.dumps(answers)
    except Exception as error:
        return pickle.dumps(f"its answer cannot be pickled: {error_text(error)}")


def answer_together(
    loop: LoopThread, function: Callable[..., Any], columns: Sequence[list[Any]], *, batched: bool
) -> list[Any] | str:
    """Calls the function with all rows, or the only one if it is not `batched`. Returns the answers, or what it raised.

    A plain function is called in the main thread, where it may run an event loop of its own.
    """
    arguments = columns if batched else [value for (value,) in columns]
    try:
        with without_exit():
            answers = function(*arguments)
            if inspect.isawaitable(answers):
                answers = loop.run(_awaited(answers))
            if not batched:
                return [answers]
            if isinstance(answers, Iterable) and not isinstance(answers, str | bytes | Mapping):
                return list(answers)
    except Exception as error:
        return described(error)
    return (
        f"it returned a {type(answers).__name__}; expected: a list of {len(columns[0])} answers. A function of one sample "
        "needs batched=false"
    )


async def answer_singly(
    function: Callable[..., Any], columns: Sequence[list[Any]], deadline: Deadline, concurrency: int = 0
) -> list[Any]:
    """Runs the coroutines of the rows concurrently, each under the deadline. Returns one answer or `Failed` per row."""
    rows = list(zip(*columns, strict=True))
    turn = asyncio.Semaphore(concurrency or max(len(rows), 1))

    async def one(row: tuple[Any, ...]) -> Any:
        async with turn:
            limit = asyncio.timeout(deadline.seconds)
            try:
                async with limit:
                    return await _awaited(function(*row))
            except Exception as error:
                return Failed(deadline.missed + place_of(error.__cause__ or error) if limit.expired() else described(error))

    return list(await asyncio.gather(*map(one, rows)))


async def _awaited(result: Awaitable[Item]) -> Item:
    with without_exit():
        return await result


async def _end_tasks() -> None:
    """Cancels the tasks that a call left."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


if __name__ == "__main__":
    main()
