"""The environment of `environment.tools`: calls the Python functions that the policy asks for, and replies with the results.

A tool is a function with type hints and a docstring in Google's style, from which transformers makes its JSON schema for the
chat template. vLLM's parser of the model's family (`environment.tool_parser`) finds the calls in a turn. A call that fails,
or whose arguments are not valid, is answered with the error, so that the policy can try again. A turn without calls ends
the sequence.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dagrl.config import Json
from dagrl.errors import ConfigError, error_text
from dagrl.imports import load_callable
from dagrl.rl.functions.episodes import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tools = Mapping[str, Callable[..., Any]]

KEY = "environment.tools"


@dataclass(frozen=True)
class Calls:
    """A turn's text without its calls, and the name and JSON arguments of each call."""

    text: str
    calls: Sequence[tuple[str, str]]


CallParser = Callable[[str], Calls]
"""Splits the text of a turn, with special tokens, into that without them and the calls."""


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

    @staticmethod
    def prepare(tools: Sequence[str], tokenizer: str, tool_parser: str) -> None:
        """Imports vLLM when a process starts, as that takes longer than a step."""
        _call_parser(tuple(tools), tool_parser, tokenizer)

    def reset(self, example: Mapping[str, Any]) -> None:
        """Tools keep no state of an episode."""

    async def step(self, completion: str) -> Step:
        """Calls the tools that the turn asks for, all at once."""
        calls = self._parse(completion).calls
        if not calls:
            return Step(None)
        results = await asyncio.gather(*(self._result(name, arguments) for name, arguments in calls))
        return Step(
            [
                {"role": "tool", "name": name, "tool_call_id": f"{number:09}", "content": result}
                for number, ((name, _), result) in enumerate(zip(calls, results, strict=True))
            ]
        )

    async def _result(self, name: str, arguments: str) -> str:
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
        return result if isinstance(result, str) else json.dumps(result, default=str)


@cache
def _call_parser(tools: tuple[str, ...], name: str, tokenizer: str) -> CallParser:
    from transformers import AutoTokenizer

    return vllm_parser(json.dumps(tool_schemas(load_tools(tools))), name, AutoTokenizer.from_pretrained(tokenizer))


def vllm_parser(schemas: str, name: str, tokenizer: PreTrainedTokenizerFast) -> CallParser:
    """Returns vLLM's parser `name` for tools with these schemas, a JSON text. Imports vLLM, which takes seconds."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # A policy that learns makes calls that cannot be parsed, and vLLM's parsers log a traceback of each.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    request = ChatCompletionRequest(messages=[], tools=json.loads(schemas), tool_choice="auto")
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)

    special = "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True)))

    def plain(text: str) -> str:
        return re.sub(special, "", text) if special else text

    def parse(text: str) -> Calls:
        for tried in dict.fromkeys((plain(text), text)):  # some families mark calls by special tokens
            parsed = parser.extract_tool_calls(tried, request)
            if parsed.tool_calls:
                calls = [(call.function.name, call.function.arguments) for call in parsed.tool_calls]
                return Calls(plain(parsed.content or ""), calls)
        return Calls(plain(text), [])

    return parse
