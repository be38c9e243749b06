"""Agents in a child process: functions that talk to the policy through an endpoint, many episodes at once."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dagrl.rl.functions.answers import Failed, described, is_coroutine, without_exit
from dagrl.runtime.deadline import Deadline

THREADS = 256  # plain agents that run at once in a process


@dataclass(frozen=True)
class Endpoint:
    """The policy's endpoint: the arguments of an OpenAI client, and the name to ask for as `model`.

    The API key is that of one episode. It ends with the episode.
    """

    base_url: str
    api_key: str
    model: str


class AgentHost:
    """The episodes of a process, by number. `reply` gets the answer to each; `spawn` runs a coroutine in the event loop."""

    def __init__(
        self,
        function: Callable[..., Any],
        deadline: Deadline,
        spawn: Callable[[Coroutine[Any, Any, Any]], Future[Any]],
        reply: Callable[[int, Any], None],
    ) -> None:
        self._function, self._deadline, self._spawn, self._reply = function, deadline, spawn, reply
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
        self._episodes: dict[int, Future[Any]] = {}

    def __call__(self, number: int, request: Mapping[str, Any] | None) -> None:
        """Starts an episode, or cancels it if there is no request."""
        if request is not None:
            self._episodes[number] = episode = self._spawn(self._episode(number, request))
            episode.add_done_callback(lambda _: self._episodes.pop(number, None))
        elif (running := self._episodes.get(number)) is not None:
            running.cancel()

    async def _episode(self, number: int, request: Mapping[str, Any]) -> None:
        self._reply(number, await self._answer(request))

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        """Returns the agent's result. At the deadline a coroutine is cancelled; a plain function loses its endpoint."""
        limit = asyncio.timeout(self._deadline.seconds)
        try:
            async with limit:
                arguments = request["example"], Endpoint(**request["endpoint"])
                with without_exit():
                    if is_coroutine(self._function):
                        return await self._function(*arguments)
                    return await asyncio.get_running_loop().run_in_executor(self._threads, self._function, *arguments)
        except Exception as error:
            return Failed(self._deadline.missed if limit.expired() else described(error))
