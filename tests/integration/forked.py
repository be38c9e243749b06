"""Processes forked from one that has imported what they need, so that it is imported once."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from dagrl.machine import gpu_count


def fork_servers(
    count: int, prepare: Callable[..., None], serve: Callable[[Connection], None], *arguments: Any
) -> tuple[Sequence[Connection], Callable[[], None]]:
    """Returns the connections of `count` processes that run `serve`, and what ends them. `serve` returns after None.

    They are forked after `prepare(*arguments)`, which starts no threads. With GPUs, each process calls it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*[context.Pipe() for _ in range(count)], strict=True)
    parent = context.Process(target=_fork, args=(theirs, prepare, serve, arguments), daemon=True)
    parent.start()
    for connection in theirs:
        connection.close()

    def end() -> None:
        for connection in ours:
            with suppress(OSError):  # it has ended
                connection.send(None)
        parent.join(10)
        parent.kill()

    return ours, end


def _fork(
    connections: Sequence[Connection],
    prepare: Callable[..., None],
    serve: Callable[[Connection], None],
    arguments: Sequence[Any],
) -> None:
    if not gpu_count():
        prepare(*arguments)
    for mine in connections:
        if os.fork() == 0:
            for other in connections:
                if other is not mine:
                    other.close()
            prepare(*arguments)
            with suppress(EOFError):  # the tests have ended
                serve(mine)
            os._exit(0)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()
