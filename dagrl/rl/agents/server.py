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
from dagrl.rl.agents.episode import AgentEpisode, Limits, Result, Turn
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
        reply = _Reply(self, episode, turn, ChatFormat(body, self.renderer.token_text, turn.prompt))
        self.inbox.put(episode, turn)
        answer = await reply.whole(request)
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


@dataclass
class _Reply:
    """Sends the answer to one request to its client."""

    server: EndpointServer
    episode: AgentEpisode
    turn: Turn
    format: ChatFormat

    async def whole(self, request: Request) -> dict[str, Any]:
        """Returns the whole answer. A client that goes away cancels its request."""
        gone, future = asyncio.create_task(_disconnected(request)), self.turn.result
        try:
            await asyncio.wait((gone, future), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise EndpointError("the client has gone", status=499)
            result = _checked(future.result())
            text, calls = await self._recorded(result)
            return self.format.whole(result, text, calls)
        finally:
            gone.cancel()
            if self.episode.give_up(self.turn):
                self.server.inbox.wake()

    async def _recorded(self, result: FinishedRequest) -> tuple[str, Calls]:
        """Records the answer. Returns its text and its tool calls."""
        stops = *self.server.limits.stop, *self.turn.options.stop
        text = _before_stop(self.server.renderer.text(result.tokens), stops)
        calls: Calls = ()
        if self.format.body.offered_tools:
            whole = _before_stop(self.server.renderer.text(result.tokens, special=True), stops)
            parsed = await asyncio.to_thread(self.server.renderer.parse_calls, self.format.body, whole)
            text = parsed.text if parsed.calls else text
            ids = call_ids(parsed.calls, known_ids(self.format.body.messages))
            calls = [*zip(ids, parsed.calls, strict=True)]
        functions = [{"function": {"name": call.name, "arguments": call.arguments}} for _, call in calls]
        key = message_key({"role": "assistant", "content": text, "tool_calls": functions})
        self.episode.record(self.turn, result, key)
        return text, calls


def _checked(result: Result) -> FinishedRequest:
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


@dataclass(frozen=True)
class ChatFormat:
    """Formats the answer to one request in OpenAI's format, with `policy_versions`: those that made its tokens, in ascending
    order.

    `token_text` decodes one token; `prompt` are the tokens of the request's whole context.
    """

    body: ChatBody
    token_text: Callable[[int], str]
    prompt: Sequence[int]

    def whole(self, result: FinishedRequest, text: str, calls: Calls) -> dict[str, Any]:
        """Returns the whole answer. `result` has all tokens, `text` what they say besides `calls`."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            functions = [
                {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for identity, call in calls
            ]
            message |= {"content": text or None, "tool_calls": functions}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else result.finish_reason}
        prompt, completion = len(self.prompt), len(result.tokens)
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "policy_versions": sorted(set(result.versions)),
            "choices": [{**choice, **self._tokens(result)}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
            **({"prompt_token_ids": list(self.prompt)} if self.body.return_token_ids else {}),
        }

    def _tokens(self, result: FinishedRequest) -> dict[str, Any]:
        """Returns the log-probabilities and ids of the tokens that the request asks for."""
        ids = {"token_ids": list(result.tokens)} if self.body.return_token_ids else {}
        if not self.body.logprobs:
            return {"logprobs": None, **ids}
        content = []
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            text = self.token_text(token)
            content.append({"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []})
        return {"logprobs": {"content": content, "refusal": None}, **ids}


def chunks_of(answer: dict[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """Returns the chunks of a whole answer: one with everything, and with `usage` one without choices, for the counts of
    tokens. A client that did not ask for it reads `choices[0]` of every chunk."""
    (choice,) = answer["choices"]
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {**answer, "object": "chat.completion.chunk"}
    counts = {**head, "choices": [], "usage": head.pop("usage")}
    return [{**head, "choices": [{**choice, "delta": delta}]}, *([counts] if usage else [])]
