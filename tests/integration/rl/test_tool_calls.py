"""Calls of tools in the model's format, which vLLM parses: of the endpoint and of `environment.tools`."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from dagrl.config import EnvironmentConfig
from dagrl.data.chat import chat_of
from dagrl.data.tokenization import Prompt
from dagrl.rl.environments import EnvironmentRunner, Question, Reply, check_environment, reply_text
from dagrl.rl.tools import Calls, load_tools, tool_schemas, vllm_parser
from dagrl.run.model import character_tokenizer
from tests.integration.rl.test_agent_packages import served
from tests.unit.rl.test_agent_endpoint import ASKED, END, Served, learned_texts
from tests.unit.rl.test_tools import CHARACTERS, TEMPLATE, add, called

__all__ = ["add", "served"]  # a tool, and a fixture

pytest.importorskip("vllm")


async def look_up(word: str) -> str:
    """Looks up a word.

    Args:
        word: the word
    """
    await asyncio.sleep(0)
    return {"cat": "an animal"}[word]


def shown(*contents: str) -> str:
    turns = "".join(f"<|im_start|>tool\n{content}<|im_end|>\n" for content in contents)
    return f"\n{turns}<|im_start|>assistant\n"


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
    questions = [Question(f"0/{place}", prompt, 0, [text]) for place, text in enumerate([*turns, "It is 5."])]
    config = EnvironmentConfig(tools=(f"{__name__}:add", f"{__name__}:look_up"), timeout_s=20.0)
    check_environment(config)
    with EnvironmentRunner(config, tokenizer) as environment:
        actual = environment.submit(0, questions).result()
    assert [reply_text(tokenizer, reply.content) for reply in actual[:-1]] == list(turns.values())
    assert actual[-1] == Reply(None), "a turn without a call ends the sequence"


def test_calls_that_special_tokens_mark_are_found() -> None:
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    said = "I ask." + called({"name": "add", "arguments": {"a": 2, "b": 3}})
    turn = chat_of(tokenizer).turn_text(tokenizer.encode(said), special=True)
    parse = vllm_parser(json.dumps(tool_schemas(load_tools([f"{__name__}:add"]))), "hermes", tokenizer)
    assert turn == said and parse(turn) == Calls("I ask.", [("add", '{"a": 2, "b": 3}')])
    assert parse("5<tool_call>") == Calls("5", [])


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
