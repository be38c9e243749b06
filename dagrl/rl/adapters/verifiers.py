"""Environments of the package verifiers (Prime Intellect, before 0.4): their data sets, conversations and rubrics.

    data: {task: "dagrl.rl.adapters.verifiers:examples", task_args: {name: gsm8k}}
    environment: {function: "dagrl.rl.adapters.verifiers:VerifiersEnvironment", args: {name: gsm8k}, max_turns: 10}
    reward: {function: null}

A verifiers environment runs its own loop (`Environment.run_rollout`) and asks a client for each turn. Here the client is the
policy: it hands the conversation out as what `reset` and `step` return, and waits for the text of the policy's turn. So
`setup_state`, `env_response`, stop conditions, tools and the rubric are those of the environment. The rubric's reward is the
reward of the last turn.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from dagrl.config import Json
from dagrl.data import Example, Message, Splits
from dagrl.errors import ConfigError, MissingDependencyError
from dagrl.imports import load_callable
from dagrl.rl.functions.episodes import Step
from dagrl.rl.tools import Calls, call_parser

if TYPE_CHECKING:
    from verifiers.types import Messages, Response

Turn = dict[str, Json]

MODEL = "policy"


def examples(name: str, args: Mapping[str, Json] | None = None, held_out: int = 64) -> Splits:
    """Returns the environment's training and evaluation examples. Without the latter, the last `held_out` are held out.

    `name` is that of an installed environment, for `verifiers.load_environment`, or the import path `module:function` of one
    that returns an environment; `args` are its arguments. Raises ConfigError if the environment cannot be loaded.
    """
    environment = _loaded(name, json.dumps(args or {}, sort_keys=True))
    rows = [dict(row) for row in environment.get_dataset()]
    if environment.eval_dataset is not None or environment.eval_dataset_source is not None:
        evaluation = [dict(row) for row in environment.get_eval_dataset()]
    elif held_out < len(rows):
        rows, evaluation = rows[: len(rows) - held_out], rows[len(rows) - held_out :]
    else:
        raise ConfigError(f"data.task_args: held_out is {held_out}, but {name} has {len(rows)} examples")
    schemas = [_schema(tool) for tool in environment.tool_defs or ()]
    train, validation = (
        tuple(_example(row, f"{name}, {part} {number}", schemas) for number, row in enumerate(split))
        for part, split in (("row", rows), ("evaluation row", evaluation))
    )
    return Splits(train, train, validation)


examples.requires = ("verifiers",)  # type: ignore[attr-defined]


class VerifiersEnvironment:
    """An episode of a verifiers environment. `tokenizer` and `tool_parser` find the calls in a turn if it has tools."""

    requires = ("verifiers",)
    wants_tokenizer = True

    def __init__(
        self, name: str, args: Mapping[str, Json] | None = None, *, tokenizer: str = "", tool_parser: str = ""
    ) -> None:
        """`name` and `args` are those of `examples`."""
        self._environment = _loaded(name, json.dumps(args or {}, sort_keys=True))
        self._policy = _policy_class()(_parser(self._environment, tokenizer, tool_parser))
        self._seen: list[Any] = []
        self._rollout: asyncio.Task[Mapping[str, Any]] | None = None

    @staticmethod
    def prepare(name: str, args: Mapping[str, Json] | None = None, *, tokenizer: str, tool_parser: str) -> None:
        """Loads the environment, and vLLM's parser, when a process starts, as that takes longer than a step."""
        _parser(_loaded(name, json.dumps(args or {}, sort_keys=True)), tokenizer, tool_parser)

    async def reset(self, example: Mapping[str, Any]) -> str | list[Turn]:
        """Starts the environment's loop. Returns the messages of its first request."""
        run = self._environment.run_rollout(dict(example["columns"]), self._policy, MODEL, {})
        self._rollout = asyncio.create_task(run)
        messages = await self._next()
        if messages is None:
            raise ValueError(f"the rollout ended before the first turn: {self._rollout.result().get('stop_condition')}")
        return messages[0]["content"] if [turn["role"] for turn in messages] == ["text"] else messages  # type: ignore[return-value]

    async def step(self, completion: str) -> Step:
        """Passes the policy's turn to the loop. Returns the messages that it adds before the next turn, or the reward."""
        assert self._rollout is not None
        self._policy.answer(completion)
        messages = await self._next()
        return Step(None, float(self._rollout.result()["reward"])) if messages is None else Step(messages)

    async def close(self) -> None:
        """Cancels a loop that is still running; the environment then cleans up."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait([self._rollout])

    async def _next(self) -> list[Turn] | None:
        """Returns the messages that the next request has after those of the last and the policy's turn; None at the end."""
        assert self._rollout is not None
        request = asyncio.ensure_future(self._policy.asked.get())
        try:
            await asyncio.wait([request, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._rollout.cancel()
            raise
        finally:
            request.cancel()
        if not request.done() or request.cancelled():
            if error := self._rollout.result().get("error"):
                raise RuntimeError(f"the environment failed: {error['error_chain_repr']}")
            return None
        messages, before = list(request.result()), self._seen
        if messages[: len(before)] != before or (before and messages[len(before)].role != "assistant"):
            self._rollout.cancel()
            raise ValueError("it changed messages of earlier turns; their tokens are fixed, so it may only append messages")
        self._seen = messages
        return [_turn(message) for message in messages[len(before) + 1 if before else 0 :]]


def _parser(environment: Any, tokenizer: str, tool_parser: str) -> Callable[[str], Calls] | None:
    """Returns the parser of tool calls; None without tools."""
    schemas = [_schema(tool) for tool in environment.tool_defs or ()]
    return call_parser(json.dumps(schemas), tool_parser, tokenizer) if schemas else None


@cache
def _policy_class() -> type:
    """Returns the client class; a function, as verifiers is imported only where it is used."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Policy(Client):  # type: ignore[misc]  # verifiers is not installed where types are checked
        """A client whose model is the caller of `answer`. `asked` has the messages of each request."""

        def __init__(self, parse: Callable[[str], Calls] | None) -> None:
            super().__init__(None)
            self.asked: asyncio.Queue[Messages] = asyncio.Queue()
            self._parse = parse
            self._answer: asyncio.Future[str] | None = None

        def answer(self, text: str) -> None:
            """Answers the request that was asked last."""
            assert self._answer is not None
            self._answer.set_result(text)

        async def get_response(self, prompt: Messages, *unused: object, **unused_too: object) -> Response:
            self._answer = asyncio.get_running_loop().create_future()
            self.asked.put_nowait(prompt)
            text = await self._answer
            calls = self._parse(text) if self._parse is not None else Calls(text, ())
            tool_calls = [
                ToolCall(id=f"call_{number}", name=name, arguments=arguments)
                for number, (name, arguments) in enumerate(calls.calls)
            ]
            reason = "tool_calls" if tool_calls else "stop"
            message = ResponseMessage(
                content=calls.text, tool_calls=tool_calls or None, finish_reason=reason, is_truncated=False
            )
            return Response(id="", created=int(time.time()), model=MODEL, message=message)

        def _unused(self, *unused: object) -> object:
            raise NotImplementedError

        setup_client = to_native_tool = to_native_prompt = _unused
        get_native_response = raise_from_native_response = from_native_response = _unused

        async def close(self) -> None:
            """Closes nothing: there is no connection."""

    return Policy


@cache
def _loaded(name: str, args: str) -> Any:
    """Loads an environment. Raises ConfigError if it cannot be loaded, or rewards rollouts of a group against each other."""
    vf = importlib.import_module("verifiers")
    load = getattr(vf, "load_environment", None)
    if load is None:
        raise MissingDependencyError(
            f"{name}: environments of verifiers {vf.__version__} do not run in this process; pip install 'dagrl[verifiers]'"
        )
    keywords = json.loads(args)
    try:
        environment = load_callable(name, "name")(**keywords) if ":" in name else load(name, **keywords)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(f"verifiers cannot load the environment {name!r} with {keywords}: {error}") from error
    if environment.requires_group_rollouts:
        raise ConfigError(f"the rubric of {name} compares rollouts of a group, which is not supported; use another rubric")
    return environment


def _example(row: Mapping[str, Any], source: str, schemas: Sequence[Json]) -> Example:
    prompt, answer = row["prompt"], str(row.get("answer") or "")
    if isinstance(prompt, str):
        return Example(prompt, answer, source=source, columns=row)
    turns = [_turn(message) for message in prompt]
    messages = [
        Message(str(turn["role"]), str(turn["content"]), {k: v for k, v in turn.items() if k not in ("role", "content")})
        for turn in turns
    ]
    return Example("", answer, (*messages, Message("assistant", answer)), source, schemas, row)


def _turn(message: Any) -> Turn:
    """Converts a message for the chat template: of text alone, with calls as OpenAI writes them."""
    fields = dict(message) if isinstance(message, Mapping) else message.model_dump()
    turn: Turn = {"role": fields["role"], "content": _text(fields.get("content"))}
    if fields.get("tool_call_id"):
        turn["tool_call_id"] = fields["tool_call_id"]
    if calls := fields.get("tool_calls"):
        turn["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": json.loads(call["arguments"])}}
            for call in calls
        ]
    return turn


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [dict(part) if isinstance(part, Mapping) else part.model_dump() for part in content]
    if other := {part["type"] for part in parts} - {"text"}:
        raise ValueError(f"a message has parts of the type {', '.join(sorted(other))}; only text is supported")
    return "".join(part["text"] for part in parts)


def _schema(tool: Any) -> dict[str, Json]:
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}
