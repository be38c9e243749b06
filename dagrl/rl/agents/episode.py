"""An agent's episode: its open requests and its conversations, shared by the endpoint's thread and the driver's."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dagrl.rl.agents.conversations import Answer, Context, Conversations, EpisodeRows
from dagrl.rl.agents.protocol import ChatBody, EndpointError
from dagrl.rl.generation import FinishedRequest, RequestOptions

Result = FinishedRequest | EndpointError  # the tokens that answer a request, or why there are none


@dataclass(frozen=True)
class Limits:
    """Limits and sampling parameters of the run. `room` is the maximum number of tokens of a conversation."""

    room: int
    max_new_tokens: int
    max_turns: int
    temperature: float
    top_p: float
    stop: tuple[str, ...] = ()


@dataclass(eq=False)
class Turn:
    """A request on its way through generation. `number` counts those of the episode; `prompt` is its whole context."""

    context: Context
    prompt: list[int]
    number: int
    max_new_tokens: int
    seed: int | None
    options: RequestOptions
    trained: bool
    result: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    cancelled: bool = False

    def finish(self, result: Result) -> None:
        """Passes the result to the endpoint's thread. May be called from any thread."""
        self.result.get_loop().call_soon_threadsafe(self._set, result)

    def _set(self, result: Result) -> None:
        if not self.result.done():  # cancelled with the request
            self.result.set_result(result)


class AgentEpisode:
    """One run of the agent. Methods may be called from any thread."""

    def __init__(self, key: str, api_key: str, limits: Limits, *, greedy: bool = False) -> None:
        self.key, self.api_key = key, api_key
        self.answer: Future[Any] = Future()
        self._limits, self._greedy = limits, greedy
        self._lock = threading.Lock()
        self._conversations = Conversations()
        self._open: set[Turn] = set()
        self._requests = 0
        self._ended = ""

    def ask(self, body: ChatBody, context: Callable[[Conversations], Context]) -> Turn:
        """Returns the turn of a request. Raises EndpointError if the episode has ended, or for a request beyond limits."""
        limits = self._limits
        with self._lock:
            if self._ended:
                raise EndpointError(self._ended, status=401, code="episode_ended")
            if self._requests >= limits.max_turns:
                raise EndpointError(
                    f"the episode has made environment.max_turns = {limits.max_turns} requests; raise it, or ask less",
                    code="max_turns",
                )
            given = context(self._conversations)
            prompt = given.whole()
            room = limits.room - len(prompt)
            if room < 1 or not prompt:
                raise EndpointError(
                    f"the conversation has {len(prompt)} tokens; expected 1 to {limits.room - 1} (policy.sequence_buckets "
                    "or policy.max_total_sequence_length), as an answer needs room too",
                    code="context_length_exceeded",
                )
            temperature = 0.0 if body.temperature is None and self._greedy else body.temperature
            options = RequestOptions(temperature, body.top_p, body.stop)
            most = min(body.max_completion_tokens or body.max_tokens or limits.max_new_tokens, limits.max_new_tokens, room)
            trained = body.temperature in (None, limits.temperature) and body.top_p in (None, limits.top_p)
            turn = Turn(given, prompt, self._requests, most, body.seed, options, trained)
            self._requests += 1
            self._open.add(turn)
            return turn

    def give_up(self, turn: Turn) -> bool:
        """Cancels a request whose client has gone, and returns whether it was open. Its tokens are not trained on."""
        with self._lock:
            if turn not in self._open:
                return False
            turn.cancelled = True
            self._open.remove(turn)
            return True

    def record(self, turn: Turn, result: FinishedRequest, key: str) -> None:
        """Adds an answer to the conversations, before the client gets it. Raises EndpointError if the episode has ended."""
        with self._lock:
            if turn not in self._open:
                why = self._ended or "the client of this request has gone"
                raise EndpointError(why, status=401, code="episode_ended")
            self._open.remove(turn)
            self._conversations.add(Answer(turn.context, result, key, turn.trained))

    def restart(self) -> None:
        """Resets the episode: the agent's process was lost, and another one starts it again."""
        with self._lock:
            self._cancel_open()
            self._conversations, self._requests = Conversations(), 0

    def end(self, why: str) -> None:
        """Refuses further requests, and answers the open ones with an error."""
        with self._lock:
            self._ended = why
            turns = self._cancel_open()
        for turn in turns:
            turn.finish(EndpointError(why, status=401, code="episode_ended"))

    def rows(self, most: int) -> EpisodeRows:
        """Returns the conversations; see `Conversations.rows`."""
        with self._lock:
            return self._conversations.rows(most)

    @property
    def answers(self) -> int:
        """Number of answers so far."""
        return len(self._conversations.answers)

    def _cancel_open(self) -> set[Turn]:
        turns, self._open = self._open, set()
        for turn in turns:
            turn.cancelled = True
        return turns
