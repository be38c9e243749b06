"""Agents in a child process: functions that talk to the policy through an endpoint, many episodes at once.

The parent (`dagrl.rl.functions.agent_pool`) sends `(key, request)` to start an episode and `(key, None)` to cancel one. The
child sends `(key, answer)` when one has ended, in any order.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from dagrl.errors import error_text
from dagrl.rl.functions.answers import Failed, is_coroutine, raised, without_exit
from dagrl.runtime.deadline import Deadline

THREADS = 256
"""Plain agents under way at once in a process."""


@dataclass(frozen=True)
class Endpoint:
    """Where an agent finds the policy: the arguments of an OpenAI client, and the name to ask for as `model`.

    The API key is that of one episode. It ends with the episode.
    """

    base_url: str
    api_key: str
    model: str


def serve_agents(connection: Connection, function: Callable[..., Any], deadline: Deadline) -> None:
    """Runs episodes until the connection is closed."""
    asyncio.run(_Agents(connection, function, deadline).serve())


class _Agents:
    def __init__(self, connection: Connection, function: Callable[..., Any], deadline: Deadline) -> None:
        self._connection, self._function, self._deadline = connection, function, deadline
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        inbox: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(message: tuple[str, Any] | None) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, message)

        threading.Thread(target=self._receive, args=(put,), daemon=True).start()
        while (message := await inbox.get()) is not None:
            key, request = message
            if request is not None:
                self._tasks[key] = asyncio.create_task(self._run(key, request))
            elif key in self._tasks:
                self._tasks[key].cancel()

    def _receive(self, put: Callable[[Any], Any]) -> None:
        while True:
            try:
                put(self._connection.recv())
            except (EOFError, OSError):
                put(None)
                return

    async def _run(self, key: str, request: Mapping[str, Any]) -> None:
        try:
            answer = await self._answer(request)
        finally:
            del self._tasks[key]
        try:
            message = pickle.dumps((key, answer))
        except Exception as error:  # a user's object may raise anything
            message = pickle.dumps((key, Failed(f"its answer cannot be pickled: {error_text(error)}")))
        self._connection.send_bytes(message)

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        """What the agent returns. At the deadline a coroutine is cancelled; a plain function loses its endpoint."""
        limit = asyncio.timeout(self._deadline.seconds)
        try:
            async with limit:
                arguments = request["example"], Endpoint(**request["endpoint"])
                with without_exit():
                    if is_coroutine(self._function):
                        return await self._function(*arguments)
                    return await asyncio.get_running_loop().run_in_executor(self._threads, self._function, *arguments)
        except Exception as error:
            return Failed(self._deadline.missed if limit.expired() else raised(error))
