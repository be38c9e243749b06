"""The OpenAI-compatible endpoint of a run: a Starlette application in a thread of the driver.

It serves `/v1/chat/completions` and `/v1/models`. The API key of a request names its episode. Requests go
to generation through `Inbox`; the driver's main thread takes them between two quanta and tells each of its tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError, error_text
from dagrl.rl.agents.conversations import message_key
from dagrl.rl.agents.episode import AgentEpisode, Limits, Turn
from dagrl.rl.agents.protocol import MODEL, ChatBody, EndpointError, read_body
from dagrl.rl.agents.rendering import Renderer
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.tools import Call, call_ids, known_ids
from dagrl.runtime.deadline import Deadline

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 3600
"""Seconds that idle connections stay open: a client that reuses one while it is closed would see an error."""

Calls = Sequence[tuple[str, Call]]  # tool calls, each with its id


class Inbox:
    """A queue of requests for the driver's main thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turns: list[tuple[AgentEpisode, Turn]] = []
        self.news: Future[None] = Future()

    def put(self, episode: AgentEpisode, turn: Turn) -> None:
        """Adds a request."""
        with self._lock:
            self._turns.append((episode, turn))
            self.wake()

    def wake(self) -> None:
        """Completes `news`, as a request came or was cancelled."""
        with self._lock:
            if not self.news.done():
                self.news.set_result(None)

    def take(self) -> list[tuple[AgentEpisode, Turn]]:
        """Returns the requests since the last call. `news` is done when there is something to take or to cancel."""
        with self._lock:
            turns, self._turns = self._turns, []
            if self.news.done():
                self.news = Future()
            return turns


@dataclass
class EndpointServer:
    """Listens from `start` to `stop`. `episodes` are those under way, by API key."""

    host: str
    port: int
    renderer: Renderer
    limits: Limits
    inbox: Inbox
    episodes: dict[str, AgentEpisode] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """The `base_url` of clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def start(self) -> None:
        """Starts to listen. Raises ConfigError if the address cannot be used."""
        import uvicorn

        listening = _listen(self.host, self.port)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._application(),
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="endpoint", daemon=True
        )
        self._thread.start()

    def stop(self, deadline: Deadline) -> None:
        """Stops listening. Answer open requests with an error first (`AgentEpisode.end`)."""
        self._server.should_exit = True
        self._thread.join(deadline.seconds)
        if self._thread.is_alive():  # it is a daemon, and may not hide why the run ends
            logger.warning("the endpoint of the agents did not end within %s = %g s", deadline.key, deadline.seconds)

    def _application(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        def refused(request: Request, error: Exception) -> Response:
            if not isinstance(error, EndpointError):
                error = EndpointError(f"{request.method} {request.url.path}: {error_text(error)}", status=500)
            return JSONResponse(error.body(), error.status)

        def unknown(request: Request, _: Exception) -> Response:
            what = f"{request.method} {request.url.path} is not served here"
            return refused(request, EndpointError(f"{what}; use /v1/chat/completions", status=404))

        return Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={EndpointError: refused, 404: unknown, 405: unknown, Exception: refused},
        )

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        self._episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "dagrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, Response

        episode = self._episode(request)
        body = read_body(await request.body())
        body = await asyncio.to_thread(self.renderer.read, body)  # decodes images
        turn = episode.ask(body, partial(self.renderer.context, body))
        self.inbox.put(episode, turn)
        try:
            result = await _result(request, turn)
            text, calls = await self._recorded(episode, turn, body, result)
        finally:
            if episode.give_up(turn):
                self.inbox.wake()
        answer = whole_answer(body, turn.prompt, result, text, calls, self.renderer.token_text)
        if not body.stream:
            return JSONResponse(answer)
        chunks = chunks_of(answer, usage=bool(body.stream_options.get("include_usage")))
        events = [*map(json.dumps, chunks), "[DONE]"]
        return Response("".join(f"data: {event}\n\n" for event in events), media_type="text/event-stream")

    def _episode(self, request: Request) -> AgentEpisode:
        """Returns the episode whose API key the request has."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        episode = self.episodes.get(key) if kind.lower() == "bearer" else None
        if episode is None:
            raise EndpointError(
                "the API key is not that of an episode under way; pass endpoint.api_key to the client",
                status=401,
                code="invalid_api_key",
            )
        return episode

    async def _recorded(
        self, episode: AgentEpisode, turn: Turn, body: ChatBody, result: FinishedRequest
    ) -> tuple[str, Calls]:
        """Records the answer to a request. Returns its text and its tool calls."""
        stops = *self.limits.stop, *turn.options.stop
        text = _before_stop(self.renderer.text(result.tokens), stops)
        calls: Calls = ()
        if body.offered_tools:
            whole = _before_stop(self.renderer.text(result.tokens, special=True), stops)
            parsed = await asyncio.to_thread(self.renderer.parse_calls, body, whole)
            text = parsed.text if parsed.calls else text
            calls = [*zip(call_ids(parsed.calls, known_ids(body.messages)), parsed.calls, strict=True)]
        functions = [{"function": {"name": call.name, "arguments": call.arguments}} for _, call in calls]
        episode.record(turn, result, message_key({"role": "assistant", "content": text, "tool_calls": functions}))
        return text, calls


async def _result(request: Request, turn: Turn) -> FinishedRequest:
    """Waits for the tokens that answer a request. Raises EndpointError if there are none, or the client has gone."""
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((gone, turn.result), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not turn.result.done():
        raise EndpointError("the client has gone", status=499)
    result = turn.result.result()
    if isinstance(result, EndpointError):
        raise result
    if result.finish_reason not in ("stop", "length"):
        raise EndpointError(f"vLLM ended the request with {result.finish_reason!r}; its log says why", status=500)
    return result


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


async def _disconnected(request: Request) -> None:
    """Waits until the client disconnects, after the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"environment.endpoint: cannot listen on {host} port {port}: {error}. Set environment.endpoint.host to an "
            "address of this machine, and port to a free one or 0"
        ) from error


def whole_answer(
    body: ChatBody,
    prompt: Sequence[int],
    result: FinishedRequest,
    text: str,
    calls: Calls,
    token_text: Callable[[int], str],
) -> dict[str, Any]:
    """Returns an answer in OpenAI's format, with `policy_versions`: those that made its tokens, in ascending order.

    `prompt` are the tokens of the request's whole context, `text` is what those of `result` say besides `calls`.
    `token_text` decodes one token.
    """
    choice: dict[str, Any] = {"index": 0, "finish_reason": result.finish_reason, "logprobs": None}
    choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        functions = [
            {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for identity, call in calls
        ]
        choice["message"] |= {"content": text or None, "tool_calls": functions}
        choice["finish_reason"] = "tool_calls"
    if body.logprobs:
        content = []
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            piece = token_text(token)
            content.append({"token": piece, "logprob": float(logprob), "bytes": list(piece.encode()), "top_logprobs": []})
        choice["logprobs"] = {"content": content, "refusal": None}
    answer = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "policy_versions": sorted(set(result.versions)),
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(result.tokens),
            "total_tokens": len(prompt) + len(result.tokens),
        },
    }
    if body.return_token_ids:
        choice["token_ids"], answer["prompt_token_ids"] = list(result.tokens), list(prompt)
    return answer


def chunks_of(answer: dict[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """Returns the chunks of a whole answer: one with everything, and with `usage` one without choices, for the counts of
    tokens. A client that did not ask for it reads `choices[0]` of every chunk."""
    (choice,) = answer["choices"]
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {**answer, "object": "chat.completion.chunk"}
    counts = {**head, "choices": [], "usage": head.pop("usage")}
    return [{**head, "choices": [{**choice, "delta": delta}]}, *([counts] if usage else [])]
