"""Calls of tools in the model's format, which vLLM parses and forces, of the endpoint and of `environment.tools`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dagrl.config import EnvironmentConfig
from dagrl.data.tokenization import Prompt
from dagrl.rl.agents.episode import Limits
from dagrl.rl.environments import EnvironmentRunner, Question, Reply, check_environment
from dagrl.run.model import character_tokenizer
from tests.unit.rl.test_agent_endpoint import ASKED, DOUBLE, END, STOP, TOOLS, Served, learned_texts
from tests.unit.rl.test_tools import CHARACTERS, TEMPLATE, add, called

__all__ = ["add"]  # a tool

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")


async def look_up(word: str) -> str:
    """Looks up a word.

    Args:
        word: the word
    """
    await asyncio.sleep(0)
    return {"cat": "an animal"}[word]


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    served.episode._limits = Limits(2000, 200, 9, 1.0, 1.0)
    yield served
    served.generation.close()
    served.server.stop(STOP)


def shown(*contents: str) -> str:
    turns = "".join(f"<|im_start|>tool\n{content}<|im_end|>\n" for content in contents)
    return f"<|im_end|>\n{turns}<|im_start|>assistant\n"


def test_calls_are_answered_in_the_chat_template() -> None:
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    turns = {
        called({"name": "add", "arguments": {"a": 2, "b": 3}}): shown("5"),
        "I look: "
        + called({"name": "look_up", "arguments": {"word": "cat"}}, {"name": "add", "arguments": {"a": 1, "b": 1}}): shown(
            "an animal", "2"
        ),
        called({"name": "look_up", "arguments": {"word": "dog"}}): shown("error: KeyError: 'dog'"),
        called({"name": "add", "arguments": {"a": 1}}): shown("error: TypeError: missing a required argument: 'b'"),
        called({"name": "subtract", "arguments": {}}): shown("error: there is no tool 'subtract'; there are: add, look_up"),
    }
    prompt = Prompt("p", np.array([1]), "", "row 0")
    questions = [Question(f"0/{place}", prompt, 0, [text], closed=False) for place, text in enumerate([*turns, "It is 5."])]
    config = EnvironmentConfig(tools=(f"{__name__}:add", f"{__name__}:look_up"), timeout_s=20.0)
    check_environment(config)
    with EnvironmentRunner(config, tokenizer) as environment:
        found = environment.submit(0, questions).result()
    assert found == [*map(Reply, turns.values()), Reply(None)], "a turn without a call ends the sequence"


def test_a_tool_call_and_its_result(served: Served) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "double", "parameters": parameters}}]
    said = "I ask. " + called({"name": "double", "arguments": {"a": 2}})
    limits = {"tools": tools, "max_tokens": None}
    answer = served.chat(ASKED, said, **limits)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("double", {"a": 2})
    assert answer.choices[0].finish_reason == "tool_calls" and message.content.strip() == "I ask."
    assert '"name": "double"' in served.tokenizer.decode(answer.prompt_token_ids).split(END)[0], "the template shows tools"
    echoed = message.model_dump(exclude_none=True)
    echoed["tool_calls"][0]["function"]["arguments"] = '{"a":2}'  # as a framework may write it
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    events = list(served.chat([*ASKED, echoed, result], said, stream=True, **limits))
    assert events[-1].choices[0].delta.tool_calls[0].function.name == "double"
    (row,) = served.rows()
    assert "".join(learned_texts(served, row)) == f"{said}{END}{said}{END}"


HALF = {"type": "function", "function": {"name": "half"}}


def allowed(constraint: str, *texts: str) -> list[bool]:
    """Whether xgrammar, without vLLM, takes each text as a whole answer."""
    import xgrammar

    ((kind, value),) = json.loads(constraint).items()
    characters = xgrammar.TokenizerInfo(["</s>", *CHARACTERS], stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(characters)
    grammar = compiler.compile_structural_tag(value) if kind == "structural_tag" else compiler.compile_json_schema(value)
    matchers = [xgrammar.GrammarMatcher(grammar) for _ in texts]
    return [one.accept_string(text) and one.accept_token(0) for one, text in zip(matchers, texts, strict=True)]


def test_an_answer_that_must_be_a_call_or_json(served: Served) -> None:
    double, half = (called({"name": name, "arguments": {"a": 2}}) for name in ("double", "half"))
    wrong = called({"name": "half", "arguments": {"a": "x"}})
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": DOUBLE}}
    cases: list[tuple[dict[str, Any], str, list[bool]]] = [
        ({"tools": TOOLS, "tool_choice": "required"}, half, [True, True, False, False, False]),
        ({"tools": TOOLS, "tool_choice": HALF}, half, [False, True, False, False, False]),
        ({"response_format": schema}, '{"a": 2}', [False, False, False, True, False]),
        ({"response_format": {"type": "json_object"}}, '{"a": "x"}', [False, False, False, True, False]),
        ({"tools": TOOLS, "response_format": schema}, '{"a": 2}', [True, True, False, True, False]),
    ]
    for options, said, takes in cases:
        answer = served.chat(ASKED, said, max_tokens=None, **options)
        constraint = served.generation.turns[-1].options.constraint
        assert allowed(constraint, double, half, wrong, '{"a": 2}', "it is 5") == takes, options
        message = answer.choices[0].message
        if "tool_choice" in options:
            (call,) = message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("half", {"a": 2})
        else:
            assert json.loads(message.content) and not message.tool_calls
    events = list(served.chat(ASKED, half, max_tokens=None, tools=TOOLS, tool_choice="required", stream=True))
    assert events[-1].choices[0].delta.tool_calls[0].function.name == "half"
    assert all(turn.trained for turn in served.generation.turns)


def test_a_schema_that_no_grammar_has_is_named(served: Served) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match=r"vLLM cannot limit answers to this schema: .*nothing"):
        served.client.chat.completions.create(model="policy", messages=ASKED, response_format=wrong)
    assert not served.generation.turns
