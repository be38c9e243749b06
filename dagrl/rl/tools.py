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

Choice = str | Mapping[str, Any]
"""OpenAI's `tool_choice`: `auto`, `required`, or a function's name as `{"type": "function", "function": {"name": ...}}`."""

KEY = "environment.tools"


@dataclass(frozen=True)
class Calls:
    """A turn's text without its calls, and the name and JSON arguments of each call."""

    text: str
    calls: Sequence[tuple[str, str]]


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

    wants_tokenizer = True

    def __init__(self, tools: Sequence[str], *, tokenizer: str, tool_parser: str) -> None:
        """`tools` are import paths, `tokenizer` is a directory, and `tool_parser` vLLM's name."""
        self._tools = load_tools(tools)
        self._parse = call_parser(json.dumps(tool_schemas(self._tools)), tool_parser, tokenizer)

    @staticmethod
    def prepare(tools: Sequence[str], tokenizer: str, tool_parser: str) -> None:
        """Imports vLLM when a process starts, as that takes longer than a step."""
        call_parser(json.dumps(tool_schemas(load_tools(tools))), tool_parser, tokenizer)

    def reset(self, example: Mapping[str, Any]) -> None:
        """Tools keep no state of an episode."""

    async def step(self, completion: str) -> Step:
        """Calls the tools that the turn asks for, all at once."""
        calls = self._parse(completion).calls
        if not calls:
            return Step(None)
        results = await asyncio.gather(*(self._result(name, arguments) for name, arguments in calls))
        return Step([{"role": "tool", "name": call[0], "content": text} for call, text in zip(calls, results, strict=True)])

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
def call_parser(schemas: str, name: str, tokenizer: str) -> CallParser:
    """Returns the parser of some tools.

    `schemas` is the JSON text of the tools' schemas, `name` that of vLLM's parser, and `tokenizer` a directory.
    """
    from transformers import AutoTokenizer

    return CallParser(schemas, name, AutoTokenizer.from_pretrained(tokenizer))


class CallParser:
    """vLLM's parser of a model family, for some tools. The first one imports vLLM, which takes seconds."""

    def __init__(self, schemas: str, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
        """See `call_parser`."""
        from vllm.tool_parsers import ToolParserManager

        # A policy that learns makes calls that cannot be parsed, and vLLM's parsers log a traceback of each.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._schemas, self._name = schemas, name
        self._request = self._request_of("auto")
        self._parser = ToolParserManager.get_tool_parser(name)(tokenizer, self._request.tools)

    def __call__(self, text: str, choice: Choice = "auto") -> Calls:
        """Splits a turn into its text and its calls. `choice` is what the turn was limited to."""
        if choice != "auto" and self._parser.supports_required_and_named:
            return _json_calls(text, choice)
        parsed = self._parser.extract_tool_calls(text, self._request)
        calls = [(call.function.name, call.function.arguments) for call in parsed.tool_calls]
        return Calls((parsed.content or "") if calls else text, calls)

    def constraint(self, choice: Choice, schema: Json = None) -> dict[str, Json]:
        """Returns the field of vLLM's `StructuredOutputsParams` that limits a turn to calls, and its value.

        With a JSON `schema`, a turn may be what that allows instead. Raises ConfigError if vLLM has none for the parser.
        """
        request = self._request_of(choice)
        tag = None if self._parser.supports_required_and_named else self._parser.get_structural_tag(request)
        if tag is not None:
            content = tag.model_dump()
            if schema is not None:
                answer = {"type": "json_schema", "json_schema": schema}
                content["format"] = {"type": "or", "elements": [content["format"], answer]}
            return {"structural_tag": json.dumps(content)}
        if schema is not None:
            raise ConfigError(f"vLLM's tool parser {self._name!r} (environment.tool_parser) cannot mix calls and a schema")
        adjusted = self._parser.adjust_request(request).structured_outputs
        fields = ("json", "grammar", "structural_tag")
        constraint = {field: value for field in fields if (value := getattr(adjusted, field, None)) is not None}
        if not constraint:
            raise ConfigError(
                f"vLLM's tool parser {self._name!r} (environment.tool_parser) cannot force calls; ask with tool_choice=auto"
            )
        return constraint

    def _request_of(self, choice: Choice) -> Any:
        """Returns vLLM's request with these tools. Arguments follow the schemas, unless a tool has `strict: false`."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        tools = json.loads(self._schemas)
        for tool in tools if choice != "auto" else ():
            tool["function"].setdefault("strict", True)
        return ChatCompletionRequest(messages=[], tools=tools, tool_choice=choice)


def _json_calls(text: str, choice: Choice) -> Calls:
    """Parses a turn that vLLM limits to JSON: a list of calls, or the arguments of the function that was named.

    A turn that was cut off has none.
    """
    try:
        content = json.loads(text)
    except ValueError:
        return Calls(text, ())
    if not isinstance(choice, str):
        return Calls("", [(choice["function"]["name"], text)])
    return Calls("", [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in content])


def check_constraint(constraint: Mapping[str, Json]) -> None:
    """Raises ValueError if vLLM's grammars (xgrammar, see `dagrl.workers.vllm.launch`) cannot express a constraint."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(**constraint)))
    except Exception as error:  # vLLM's class differs between its versions, and xgrammar raises several
        raise ValueError(str(error)) from error
