"""Tools by function schema: vLLM's parser finds the calls, and the chat template shows schemas and results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dagrl.config import EnvironmentConfig
from dagrl.data import Example, Message
from dagrl.data.examples import with_tools
from dagrl.data.tokenization import Prompt, encode_prompts
from dagrl.errors import ConfigError
from dagrl.rl.environments import EnvironmentRunner, Question, Reply, check_environment, reply_text
from dagrl.rl.tools import load_tools, tool_schemas
from dagrl.run.model import character_tokenizer

pytest.importorskip("vllm")

TOOLS = """
import asyncio

def add(a: int, b: int) -> int:
    '''Adds two numbers.

    Args:
        a: the first
        b: the second
    '''
    return a + b

async def look_up(word: str) -> str:
    '''Looks up a word.

    Args:
        word: the word
    '''
    await asyncio.sleep(0)
    return {"cat": "an animal"}[word]

def untyped(a):
    '''Has no types.'''
"""
# Qwen's turns, without the rest of its template
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"tools_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def called(*calls: object) -> str:
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def shown(*contents: str) -> str:
    turns = "".join(f"<|im_start|>tool\n{content}<|im_end|>\n" for content in contents)
    return f"<|im_end|>\n{turns}<|im_start|>assistant\n"


def test_calls_are_answered_in_the_chat_template(module: str) -> None:
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
    config = EnvironmentConfig(tools=(f"{module}:add", f"{module}:look_up"), timeout_s=20.0)
    check_environment(config)
    with EnvironmentRunner(config, tokenizer) as environment:
        found = environment.submit(0, questions).result()
    assert found == [*map(Reply, turns.values()), Reply(None)], "a turn without a call ends the sequence"


def test_a_reply_follows_the_end_of_the_turn_that_was_sampled() -> None:
    """Prompt, turn and reply are what the template writes for the whole conversation."""
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "5"}]
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened + "call<|im_end|>" + reply_text(tokenizer, messages[2:], closed=True) == whole
    assert opened + "call" + reply_text(tokenizer, messages[2:], closed=False) == whole


def test_prompts_show_the_schemas(module: str) -> None:
    schemas = tool_schemas(load_tools([f"{module}:add"]))
    chat = Example("", "5", (Message("user", "2+3"), Message("assistant", "5")), "row 0")
    (prompt,) = encode_prompts([with_tools(chat, schemas)], character_tokenizer(CHARACTERS, TEMPLATE))
    (shown_schema,) = json.loads(prompt.text.split("\n")[1].removesuffix("<|im_end|>"))
    assert shown_schema["function"]["name"] == "add"
    assert shown_schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first"}
    with pytest.raises(ConfigError, match=r"row 1 is a plain prompt, but only a chat template can show environment\.tools"):
        with_tools(Example("2+3", "5", source="row 1"), schemas)


def test_a_tool_needs_a_schema(module: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.tools: untyped has no JSON schema: .*type hint"):
        check_environment(EnvironmentConfig(tools=(f"{module}:untyped",)))
