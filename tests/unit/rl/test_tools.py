"""Tools by function schema: the chat template shows schemas and results."""

from __future__ import annotations

import json

import pytest

from dagrl.config import EnvironmentConfig
from dagrl.data import Example, Message
from dagrl.data.examples import with_tools
from dagrl.data.tokenization import encode_prompts
from dagrl.errors import ConfigError
from dagrl.rl.environments import check_environment, reply_text
from dagrl.rl.tools import load_tools, tool_schemas
from dagrl.run.model import character_tokenizer

# Qwen's turns, without the rest of its template
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def untyped(a):  # type: ignore[no-untyped-def]
    """Has no types."""


def called(*calls: object) -> str:
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def test_a_reply_follows_the_end_of_the_turn_that_was_sampled() -> None:
    """Prompt, turn and reply are what the template writes for the whole conversation."""
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "5"}]
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened + "call<|im_end|>" + reply_text(tokenizer, messages[2:]) == whole


def test_prompts_show_the_schemas() -> None:
    schemas = tool_schemas(load_tools([f"{__name__}:add"]))
    chat = Example("", "5", (Message("user", "2+3"), Message("assistant", "5")), "row 0")
    (prompt,) = encode_prompts([with_tools(chat, schemas)], character_tokenizer(CHARACTERS, TEMPLATE))
    (shown_schema,) = json.loads(prompt.text.split("\n")[1].removesuffix("<|im_end|>"))
    assert shown_schema["function"]["name"] == "add"
    assert shown_schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first"}
    with pytest.raises(ConfigError, match=r"row 1 is a plain prompt, but only a chat template can show environment\.tools"):
        with_tools(Example("2+3", "5", source="row 1"), schemas)


def test_a_tool_needs_a_schema() -> None:
    with pytest.raises(ConfigError, match=r"environment\.tools: untyped has no JSON schema: .*type hint"):
        check_environment(EnvironmentConfig(tools=(f"{__name__}:untyped",)))
