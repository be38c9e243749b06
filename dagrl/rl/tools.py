"""The environment of `environment.tools`: calls the Python functions that the policy asks for, and replies with the results.

A tool is a function with type hints and a docstring in Google's style, from which transformers makes its JSON schema for the
chat template. vLLM's parser of the model's family (`environment.tool_parser`) finds the calls in a turn. A call that fails,
or whose arguments are not valid, is answered with the error, so that the policy can try again. A tool may also return an
image of Pillow, or parts of a message with images. A turn without calls ends the sequence.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dagrl.config import Json
from dagrl.data.chat import Chat
from dagrl.data.media import IMAGE, shows_images
from dagrl.data.messages import Messages, next_id
from dagrl.errors import ConfigError, error_text
from dagrl.imports import load_callable
from dagrl.rl.functions.episodes import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tools = Mapping[str, Callable[..., Any]]

KEY = "environment.tools"

CALL_ID = re.compile(r"\[CALL_ID\](\w+)")  # ids in calls of Mistral, which vLLM takes for a part of the function's name


@dataclass(frozen=True)
class Call:
    """A call: the function's name, its arguments as JSON, and the id that the policy wrote, if it wrote one."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Calls:
    """A turn's text without its calls, and these."""

    text: str
    calls: Sequence[Call]


def call_ids(calls: Sequence[Call], known: Sequence[str]) -> list[str]:
    """Returns the id of each call: the policy's own, or nine digits, as Mistral's templates want, that count the calls of
    the conversation. Those before have `known` ids."""
    ids = list(known)
    for call in calls:
        ids.append(call.id or next_id(ids))
    return ids[len(known) :]


def known_ids(messages: Messages) -> list[str]:
    """Returns the ids of the calls of a conversation."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [str(call.get("id")) for call in calls if isinstance(call, dict)]


CallParser = Callable[[str], Calls]  # splits the text of a turn, with special tokens, into that without them and the calls


def load_tools(paths: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Returns the functions at the import paths by name. Raises ConfigError if two have the same name."""
    tools: dict[str, Callable[..., Any]] = {}
    for path in paths:
        function = load_callable(path, KEY)
        name = function.__name__
        if name in tools:
            raise ConfigError(f"{KEY} has two functions with the name {name!r}; rename one")
        tools[name] = function
    return tools


def tool_schemas(tools: Tools) -> list[dict[str, Json]]:
    """Returns the JSON schemas of the tools. Raises ConfigError for a function without type hints or descriptions."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    schemas = []
    for name, function in tools.items():
        try:
            schemas.append(get_json_schema(function))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(
                f"{KEY}: {name} has no JSON schema: {error} Give every argument a type hint and a line under `Args:`"
            ) from error
    return schemas


class ToolEnvironment:
    """Answers the calls of a turn with messages of the role `tool`."""

    def __init__(self, tools: Sequence[str], *, tokenizer: str, tool_parser: str) -> None:
        """`tools` are import paths, `tokenizer` is a directory, and `tool_parser` vLLM's name."""
        self._tools = load_tools(tools)
        self._parse = _call_parser(tuple(tools), tool_parser, tokenizer)
        self._ids: list[str] = []

    @staticmethod
    def prepare(tools: Sequence[str], tokenizer: str, tool_parser: str) -> None:
        """Imports vLLM when a process starts, as that takes longer than a step."""
        _call_parser(tuple(tools), tool_parser, tokenizer)

    def reset(self, example: Mapping[str, Any]) -> None:
        """Tools keep no state of an episode, except the ids of its calls."""
        self._ids = known_ids(example["messages"])

    async def step(self, completion: str) -> Step:
        """Calls the tools that the turn asks for, all at once."""
        calls = self._parse(completion).calls
        if not calls:
            return Step(None)
        ids = call_ids(calls, self._ids)
        self._ids += ids
        results = await asyncio.gather(*(self._result(call.name, call.arguments) for call in calls))
        return Step(
            [
                {"role": "tool", "name": call.name, "tool_call_id": identity, "content": result}
                for call, identity, result in zip(calls, ids, results, strict=True)
            ]
        )

    async def _result(self, name: str, arguments: str) -> str | list[Any]:
        function = self._tools.get(name)
        if function is None:
            return f"error: there is no tool {name!r}; there are: {', '.join(self._tools)}"
        try:
            keywords = json.loads(arguments)
            inspect.signature(function).bind(**keywords)
            if inspect.iscoroutinefunction(function):
                result = await function(**keywords)
            else:
                result = await asyncio.to_thread(function, **keywords)
        except Exception as error:  # of the policy's arguments, or of the tool
            return f"error: {error_text(error)}"
        pillow = sys.modules.get("PIL.Image")
        if pillow is not None and isinstance(result, pillow.Image):
            return [{**IMAGE, "image": result}]
        if isinstance(result, list) and shows_images({"content": result}):
            return result
        return result if isinstance(result, str) else json.dumps(result, default=str)


@cache
def _call_parser(tools: tuple[str, ...], name: str, tokenizer: str) -> CallParser:
    from transformers import AutoTokenizer

    return vllm_parser(
        json.dumps(tool_schemas(load_tools(tools))), name, AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    )


def vllm_parser(schemas: str, name: str, tokenizer: PreTrainedTokenizerFast) -> CallParser:
    """Returns vLLM's parser `name` for tools with these schemas, a JSON text. Imports vLLM, which takes seconds.

    Raises ConfigError for a name that vLLM does not know, or a parser that is of another model or reads no texts.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # A policy that learns makes calls that cannot be parsed, and vLLM's parsers log a traceback of each.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    request = ChatCompletionRequest(messages=[], tools=json.loads(schemas), tool_choice="auto")
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        parser.extract_tool_calls("", request)
    except Exception as error:  # each parser has its own
        raise ConfigError(
            f"environment.tool_parser: vLLM's {name!r} cannot read this model's turns; choose another ({error_text(error)})"
        ) from error

    chat = Chat(tokenizer)
    special = "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True)))

    def plain(text: str) -> str:
        return re.sub(special, "", text) if special else text

    def parse(text: str) -> Calls:
        marked, text = CALL_ID.findall(text), CALL_ID.sub("", text)
        for tried in dict.fromkeys((plain(text), text)):  # some families mark calls by special tokens
            parsed = parser.extract_tool_calls(tried, request)
            if parsed.tool_calls:
                written = marked or _ids_in_json(tried)
                others = written if len(written) == len(parsed.tool_calls) else []
                calls = [call_of(call, tried, other) for call, other in zip_longest(parsed.tool_calls, others, fillvalue="")]
                return Calls(plain(parsed.content or ""), calls)
        return Calls(plain(text), [])

    def call_of(call: Any, text: str, other: str) -> Call:
        own = call.id if call.id in text else other
        return Call(call.function.name, call.function.arguments, own if own and chat.takes_id(own) else "")

    return parse


def _ids_in_json(text: str) -> list[str]:
    """Returns the ids of the JSON objects in a text: vLLM leaves out those of Mistral's calls."""
    found, place, decoder = list[Any](), 0, json.JSONDecoder()
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
            found.append(value.get("id"))
        except (ValueError, RecursionError):
            place += 1
    return [identity for identity in found if isinstance(identity, str)]
