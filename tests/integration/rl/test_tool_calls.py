"""Calls of tools in the model's format, which vLLM parses: of the endpoint and of `environment.tools`."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import EnvironmentConfig
from dagrl.data.chat import chat_of
from dagrl.data.replies import reply_row, reply_text
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError
from dagrl.rl.agents.episode import Limits
from dagrl.rl.environments import EnvironmentRunner, Question, Reply, check_environment
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.tools import Call, Calls, ToolEnvironment, load_tools, tool_schemas, vllm_parser
from dagrl.run.model import character_tokenizer
from tests.integration.rl.test_agent_packages import served
from tests.unit.data.published import KINDS, MISTRAL3, MISTRAL_TOKENS, Kind, tokenizer_of
from tests.unit.rl.test_agent_endpoint import ASKED, END, ScriptedGeneration, Served, learned_texts
from tests.unit.rl.test_environment import CHARACTERS, TOOLS_TEMPLATE, add, called

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
    tokenizer = character_tokenizer(CHARACTERS, TOOLS_TEMPLATE)
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
    assert [reply_text(chat_of(tokenizer), reply.content) for reply in actual[:-1]] == list(turns.values())
    assert actual[-1] == Reply(None), "a turn without a call ends the sequence"


def test_calls_that_special_tokens_mark_are_found() -> None:
    tokenizer = character_tokenizer(CHARACTERS, TOOLS_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    said = "I ask." + called({"name": "add", "arguments": {"a": 2, "b": 3}})
    turn = chat_of(tokenizer).turn_text(tokenizer.encode(said), special=True)
    parse = vllm_parser(json.dumps(tool_schemas(load_tools([f"{__name__}:add"]))), "hermes", tokenizer)
    assert turn == said and parse(turn) == Calls("I ask.", [Call("add", '{"a": 2, "b": 3}')])
    assert parse("5<tool_call>") == Calls("5", [])


@pytest.mark.parametrize("name", ["openai", "llama3_json", "nobody"])
def test_a_parser_that_reads_no_turns_of_the_model_is_an_error(name: str) -> None:
    """vLLM's own for gpt-oss reads tokens alone; another one misses its marks; the last is unknown."""
    with pytest.raises(ConfigError, match=rf"environment\.tool_parser: vLLM's '{name}' cannot read .* choose another"):
        vllm_parser(json.dumps(tool_schemas({"add": add})), name, character_tokenizer(CHARACTERS, TOOLS_TEMPLATE))


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
    assert events[0].choices[0].delta.tool_calls[0].function.name == "double"
    (row,) = served.rows()
    assert "".join(learned_texts(served, row)) == f"{said}{END}{said}{END}"


_CALLS = MISTRAL3.partition("[TOOL_CALLS]")[0] + "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
_REST = "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}" + MISTRAL3.partition("{% endfor %}]")[2]
_KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_KIMI_TOKENS = (
    *(f"<|im_{name}|>" for name in ("system", "user", "assistant", "tool", "middle", "end")),
    *(f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")),
)
_MARKS = (*MISTRAL_TOKENS, "[ARGS]", "[CALL_ID]")
_V3 = next(kind for kind in KINDS if kind.name == "Mistral v3")
IDS = {
    "mistral": (_V3, ["abcdefghi", "000000000", "000000001"]),
    "mistral, counted": (replace(_V3, template=_CALLS + _REST, added=_MARKS), ["000000000", "000000001", "000000002"]),
    "mistral, marked": (
        replace(_V3, template=_CALLS + "[CALL_ID]{{ c.id }}" + _REST, added=_MARKS),
        ["abcdefghi", "000000000", "000000001"],
    ),
    "kimi_k2": (
        Kind("Kimi K2", "tiktoken", "<|im_end|>", _KIMI, _KIMI_TOKENS, eos="<|im_end|>"),
        ["functions.add:0", "functions.add:1", "functions.add:2"],
    ),
}


class Saying(ScriptedGeneration):
    def _say(self, turn: Any, text: str) -> None:
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        turn.finish(FinishedRequest(0, tokens, [0.0] * len(tokens), [0] * len(tokens), "stop"))


@pytest.mark.parametrize("name", IDS)
def test_ids_of_calls_are_those_that_were_sampled_or_counted(name: str, tmp_path: Path) -> None:
    """Truth: transformers' tokens of the conversation with these ids. The endpoint and `environment.tools` give both."""
    kind, ids = IDS[name]
    tokenizer, parser = tokenizer_of(kind), name.partition(",")[0]
    tokenizer.save_pretrained(tmp_path)
    tools = tool_schemas(load_tools([f"{__name__}:add"]))
    calls = [
        {"id": identity, "type": "function", "function": {"name": "add", "arguments": {"a": number, "b": 3}}}
        for number, identity in enumerate(ids)
    ]
    results = [
        {"role": "tool", "name": "add", "tool_call_id": identity, "content": str(number + 3)}
        for number, identity in enumerate(ids)
    ]
    turns = [{"role": "assistant", "content": None, "tool_calls": part} for part in (calls[:2], calls[2:])]
    whole = [{"role": "user", "content": "2+3"}, turns[0], *results[:2], turns[1], results[2]]

    def rendered(count: int, *, opened: bool) -> list[int]:
        shown = [{key: value for key, value in turn.items() if value is not None} for turn in whole[:count]]
        return list(tokenizer.apply_chat_template(shown, tools, add_generation_prompt=opened, return_dict=False))

    served = Served(tokenizer, says=Saying, parser=parser)
    served.episode._limits = Limits(20_000, 2000, 8, 1.0, 1.0)
    environment = ToolEnvironment([f"{__name__}:add"], tokenizer=str(tmp_path), tool_parser=parser)
    environment.reset({"messages": whole[:1]})
    sent, tokens, before = list[Any](whole[:1]), rendered(1, opened=True), list[Any](whole[:1])
    try:
        for first, following in ((1, 4), (4, 6)):
            turn = rendered(first + 1, opened=False)[len(rendered(first, opened=True)) :]
            answer = served.chat(sent, tokenizer.decode(turn), tools=tools)
            assert answer.prompt_token_ids == tokens
            message = answer.choices[0].message
            sent.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                content = str(add(**json.loads(call.function.arguments)))
                sent.append({"role": "tool", "tool_call_id": call.id, "content": content})
            reply = asyncio.run(environment.step(chat_of(tokenizer).turn_text(turn, special=True))).reply
            assert reply == whole[first + 1 : following]
            before.append({"role": "assistant", "content": ""})
            tokens += [*turn, *reply_row(chat_of(tokenizer), turn, frozenset(), reply, tools, 10_000, before)[0]]
            before += reply
            assert tokens == rendered(following, opened=True)
        assert served.chat(sent, "5", tools=tools).prompt_token_ids == tokens
    finally:
        served.close()
