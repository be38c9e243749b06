"""Tokens are exact: for tokenizers and templates in the shapes of published ones, rows have the tokens of `transformers`.

Truths: `apply_chat_template(tokenize=True)` of the whole conversation, and the token that ends a turn by the model's
documentation. The mask is checked against the text: what the template writes between the prompt and that token.
"""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers.normalizers import Replace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dagrl.config import DataConfig, PolicyConfig, TokenizerConfig
from dagrl.data import Example
from dagrl.data.chat import chat_of
from dagrl.data.encoder import TextEncoder
from dagrl.data.examples import demonstration_of, preference_of
from dagrl.data.replies import reply_row, reply_text, text_tokens
from dagrl.data.tokenization import (
    Demonstration,
    encode_demonstrations,
    encode_preferences,
    encode_prompts,
    warn_of_differences,
    with_opening,
)
from dagrl.errors import DataError
from dagrl.rl.agents.conversations import Answer, Conversations, message_key
from dagrl.rl.agents.protocol import ChatBody, EndpointError
from dagrl.rl.agents.rendering import Renderer
from dagrl.rl.generation import FinishedRequest
from dagrl.run.model import character_tokenizer, load_tokenizer, save_tokenizer
from tests.unit.data.published import CHATML, COMMAND, GIGACHAT3, KINDS, MISTRAL1, TWO_WAYS, WHOLE, Kind, tokenizer_of


def reply_tokens(*arguments: Any, **variables: Any) -> list[int]:
    """Returns the tokens of a reply, for models that take no images."""
    return reply_row(*arguments, **variables)[0]


TEXTS = {
    "one": ["hello", "and it"],
    "several": ["hello it 5=5", "the hello and the\nit", "a\n\nb", "and"],
    "spaces": [" it ", "  hello\n", "the", " and"],
    "unicode": [
        "\U0001f469\u200d\U0001f467 \U0001f600",
        "\u65e5\u672c\u8a9e e\u0301 \u00e9\u00e9",
        "\u0627\u0644\u0639\u0631",
        "\u200f\u05e9 \x07\x1f",
    ],
    "long": ["the and it " * 300, "hello " * 300],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [
    {"id": f"{number:09}", "type": "function", "function": {"name": "f", "arguments": {"a": letter}}}
    for number, letter in enumerate("xy")
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
CALLING_KINDS = {kind.template: kind for kind in KINDS if kind.tools}.values()
OTHERS = [TWO_WAYS[name] for name in ("Apriel-1.5", "Apriel-1.6", "Apertus", "Command MoE", "Nemotron Nano", "QwQ")]


def messages_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


def example_of(messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> Example:
    return demonstration_of({"messages": list(messages), "tools": list(tools) or None}, "row 1", DataConfig(path="x"))


def truth(kind: Kind, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), *, opened: bool = False) -> list[int]:
    """The tokens that transformers gives a conversation."""
    tokenizer = tokenizer_of(kind)
    made = tokenizer.apply_chat_template(list(messages), list(tools) or None, tokenize=True, add_generation_prompt=opened)
    return list(made["input_ids"])


def learned_truth(kind: Kind, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
    """The truth for a row: if the template writes no end after the last turn, the token that ends it by TRL's templates."""
    end = kind.end.split()[-1 if messages[-1].get("tool_calls") else 0]
    whole = truth(kind, messages, tools)
    missing = [] if kind.writes_end or is_end(kind, whole[-1]) else [tokenizer_of(kind).convert_tokens_to_ids(end)]
    return [*whole, *missing]


def shown(kind: Kind, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages in the form that the template takes: arguments as objects or texts, and turns without content."""
    turns = []
    for message in messages:
        turn = dict(message)
        if calls := message.get("tool_calls"):
            functions = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
            if "+ c.function.arguments" in kind.template:
                functions = [{**item, "arguments": json.dumps(item["arguments"], ensure_ascii=False)} for item in functions]
            turn["tool_calls"] = [{**call, "function": item} for call, item in zip(calls, functions, strict=True)]
            turn["content"] = message.get("content") or (None if "is none" in kind.template else "")
        turns.append(turn)
    return turns


def parts(row: Demonstration) -> list[list[int]]:
    found: list[list[int]] = []
    for place, token in enumerate(row.tokens.tolist()):
        if row.loss_mask[place]:
            if not row.loss_mask[place - 1]:
                found.append([])
            found[-1].append(token)
    return found


def squeezed(text: str) -> str:
    """The text as all tokenizers give it back: composed and without spaces."""
    return "".join(normalize("NFC", text).split())


def is_end(kind: Kind, token: int) -> bool:
    return tokenizer_of(kind).convert_ids_to_tokens(token) in kind.stops


def sampled(kind: Kind, before: list[dict[str, Any]], text: str) -> list[int]:
    """A turn as generation samples it: the text's own tokens and the end."""
    tokenizer = tokenizer_of(kind)
    (row,) = encode_demonstrations([example_of([*before, {"role": "assistant", "content": text}])], tokenizer, "last")
    (turn,) = parts(row)
    return turn


@kinds
@pytest.mark.parametrize("end", ["the template's", "another", "text", "none"])
def test_turns_are_joined_by_the_templates_own_text(kind: Kind, end: str) -> None:
    """A special token that is a stop token is another end, such as a second EOS; text that is one is a part of the turn."""
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|other|>"]})
    chat, other, text = chat_of(tokenizer), len(tokenizer) - 1, 5
    asked, answer, more = messages_of(["hello", "and it", "the hello"])
    turn = sampled(kind, [asked], "and it")
    turn = {"the template's": turn, "another": [*turn[:-1], other], "text": [*turn[:-1], text], "none": turn[:-1]}[end]
    prompt = truth(kind, [asked], opened=True)
    reply = reply_tokens(chat, turn, frozenset({other, text}), [more], (), 1000)
    whole = truth(kind, [asked, answer, more], opened=True)
    kept = len(prompt) + len(turn) - (end != "none")
    if whole[:kept] == [*prompt, *turn][:kept]:
        ended = kind.ends_between and (end == "the template's" or (end == "another" and chat.end.text != ""))
        spaced = end == "text" and reply[1:] == whole[kept:]  # Llama 2's end has a space, which `turn` has before the text
        assert reply[spaced:] == whole[kept + ended :]
    else:
        assert not (kind.again and kind.opens_alike) and reply == whole[-len(reply) :]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.tools], ids=lambda kind: kind.name)
@pytest.mark.parametrize("calls", [CALLS[:1], CALLS], ids=["one call", "parallel"])
def test_calls_have_one_rendering_everywhere(kind: Kind, calls: list[Any]) -> None:
    """Data with objects, data with OpenAI's JSON text and the endpoint; environments continue with the same tokens."""
    tokenizer, chat = tokenizer_of(kind), chat_of(tokenizer_of(kind))
    if len(calls) > 1 and "tool_calls[0]" in kind.template:
        calls = calls[:1]
    text = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}} for call in calls
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "it is 5"} for call in calls]
    rows, requests = [], []
    for form in (calls, text):
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": form}, *results]
        example = example_of([*turns, {"role": "assistant", "content": "and"}], TOOLS)
        (row,), (prompt,) = encode_demonstrations([example], tokenizer, "last"), encode_prompts([example], tokenizer)
        rows.append(row.tokens.tolist())
        body = ChatBody(model="policy", messages=turns, tools=TOOLS)
        requests += [prompt.tokens.tolist(), Renderer(tokenizer, "hermes").context(body, Conversations()).whole()]
    assert rows[0] == rows[1] and requests[0] == requests[1] == requests[2] == requests[3]
    assert rows[0][: len(requests[0])] == requests[0] or not kind.opens_alike
    assert requests[0] == truth(kind, shown(kind, turns), TOOLS, opened=True)
    if not kind.again or not kind.opens_alike:
        return
    prompt_tokens = truth(kind, turns[:1], TOOLS, opened=True)
    (row,) = encode_demonstrations([example_of(turns[:2], TOOLS)], tokenizer, "last")
    (turn,) = parts(row)
    assert [*prompt_tokens, *turn, *reply_tokens(chat, turn, frozenset(), results, TOOLS, 1000)] == requests[0]
    rest = requests[0][len(prompt_tokens) + len(turn) :]
    if kind.writes_end:
        assert reply_tokens(chat, turn[:-1], frozenset(), results, TOOLS, 1000) == [turn[-1], *rest], "a string ended it"


@kinds
def test_an_agent_may_ask_again_without_a_message(kind: Kind) -> None:
    tokenizer, agent = tokenizer_of(kind), Conversations()
    renderer, turns = Renderer(tokenizer, "hermes"), messages_of(TEXTS["one"])
    context = renderer.context(ChatBody(model="policy", messages=turns[:1]), agent)
    turn = sampled(kind, turns[:1], "and it")
    result = FinishedRequest(0, turn, [0.0] * len(turn), [0] * len(turn), "stop")
    agent.add(Answer(context, result, message_key(turns[1]), trained=True))
    following = renderer.context(ChatBody(model="policy", messages=turns), agent)
    whole, reply = truth(kind, turns, opened=True), list(following.tokens)
    assert whole[len(whole) - len(reply) :] == reply == reply_tokens(chat_of(tokenizer), turn, frozenset(), [], (), 1000)
    if kind.again and kind.opens_alike and kind.writes_end:
        assert following.whole() == whole


RESULTS = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": f"it is {call['id'][-1]}"} for call in CALLS]
AS_TEXT = [{**call, "function": {"name": "f", "arguments": json.dumps(call["function"]["arguments"])}} for call in CALLS]
CHAIN = [
    {"role": "system", "content": "the"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": AS_TEXT[:1]},
    RESULTS[0],
    {"role": "assistant", "content": None, "tool_calls": AS_TEXT[1:]},
    RESULTS[1],
    {"role": "assistant", "content": "and it"},
    {"role": "user", "content": "a"},
]


@pytest.mark.parametrize("kind", [*CALLING_KINDS, *WHOLE], ids=lambda kind: kind.name)
def test_replies_are_those_of_the_whole_conversation(kind: Kind) -> None:
    """Agents send it, with the calls of the policy and results without names; environments know what they replied."""
    tokenizer, chat = tokenizer_of(kind), chat_of(tokenizer_of(kind)).of(TOOLS)
    renderer, agent, known = Renderer(tokenizer, "hermes"), Conversations(), []
    messages = CHAIN if kind.name in ("Mistral, system last", "Bielik") else CHAIN[1:]
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            known.append(message)
            continue
        sent = [{key: turn[key] for key in turn if key != "name"} for turn in messages]
        context = renderer.context(ChatBody(model="policy", messages=sent[:place], tools=TOOLS), agent)
        (row,) = encode_demonstrations([example_of(messages[: place + 1], TOOLS)], tokenizer, "last")
        turn = parts(row)[-1]
        result = FinishedRequest(0, turn, [0.0] * len(turn), [0] * len(turn), "stop")
        agent.add(Answer(context, result, message_key(message), trained=True))
        following = renderer.context(ChatBody(model="policy", messages=sent[: place + 2], tools=TOOLS), agent)
        known.append({"role": "assistant", "content": renderer.text(turn)})
        assert list(following.tokens) == reply_tokens(chat, turn, frozenset(), [messages[place + 1]], TOOLS, 1000, known)
        whole = truth(kind, shown(kind, messages[: place + 2]), TOOLS, opened=True)
        if kind.again and kind.opens_alike:
            assert following.whole() == whole
        assert list(following.tokens) == whole[-len(following.tokens) :]


@pytest.mark.parametrize("rest", ["", "<|done|>"])
@pytest.mark.parametrize("stop", ["</tool_call>", "<|endoftext|>"])
def test_the_end_follows_a_stop_that_is_written_inside_of_turns(stop: str, rest: str) -> None:
    """After `</tool_call>` the template's text goes on, to the end of the turn; `<|endoftext|>` ends a turn as well."""
    kind = KINDS[0]
    if rest:
        template = kind.template.replace("</tool_call>", "</tool_call>" + rest)
        kind = replace(kind, template=template, added=(*kind.added, rest))
    tokenizer, other = tokenizer_of(kind), stop != "</tool_call>"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": AS_TEXT[:1]}]
    (row,) = encode_demonstrations([example_of(turns, TOOLS)], tokenizer)
    (sampled,), ends = parts(row), tokenizer([rest, stop]).input_ids
    turn = [*sampled[:-1], *ends[1]] if other else sampled[: -1 - len(ends[0])]
    assert tokenizer.convert_ids_to_tokens(turn[-1]) == stop
    whole = truth(kind, shown(kind, [*turns, RESULTS[0]]), TOOLS, opened=True)
    reply = reply_tokens(chat_of(tokenizer), turn, frozenset({turn[-1]}), RESULTS[:1], TOOLS, 1000)
    assert reply == whole[int(row.loss_mask.argmax()) + len(turn) :]


@pytest.mark.parametrize("name", ["Gemma 4", "gpt-oss", "GLM-4.5, TRL", "Apertus, tools", "Kimi K2"])
def test_a_question_may_follow_a_call(name: str) -> None:
    kind = next(kind for kind in (*KINDS, *WHOLE) if kind.name == name)
    tokenizer = tokenizer_of(kind)
    asked, more = messages_of(["hello", "", "a"])[::2]
    turns = [asked, {"role": "assistant", "content": None, "tool_calls": AS_TEXT[:1]}]
    (row,) = encode_demonstrations([example_of(turns, TOOLS)], tokenizer, "last")
    reply = reply_tokens(chat_of(tokenizer), parts(row)[-1], frozenset(), [more], TOOLS, 1000)
    whole = truth(kind, shown(kind, [*turns, more]), TOOLS, opened=True)
    if name == "Apertus, tools":  # the end of the assistant's turns, of which calls are a part
        assert [tokenizer.eos_token_id, *reply[1:]] == reply
    assert [*row.tokens.tolist(), *reply] == whole


@pytest.mark.parametrize("ids", [("call_1", "call_2"), (None, None), ("call_1", "000000000"), ("abcdefghi", "call_2")])
@pytest.mark.parametrize("parallel", [False, True])
def test_mistrals_templates_take_openais_ids(ids: tuple[str | None, str | None], parallel: bool) -> None:
    """Their templates reject those of other than nine letters or digits; without any, results are in the order of calls."""
    kind = next(kind for kind in KINDS if kind.name == "Mistral v3")
    wanted = ("abcdefghi" if ids[0] == "abcdefghi" else "000000000", "000000001")
    rows = []
    for named in (ids, wanted):
        calls, results = list[dict[str, Any]](), list[dict[str, Any]]()
        for number, one in enumerate(named):
            calls.append({"function": CALLS[number]["function"]} | ({"id": one} if one else {}))
            results.append({"role": "tool", "content": f"{number}"} | ({"tool_call_id": one} if one else {}))
        said = [{"role": "assistant", "content": None, "tool_calls": part} for part in (calls, calls[:1], calls[1:])]
        made = [said[0], *(results[::-1] if ids[0] else results)] if parallel else [said[1], results[0], said[2], results[1]]
        turns = [CHAIN[1], *made, {"role": "assistant", "content": "and it"}]
        rows += encode_demonstrations([example_of(turns, TOOLS)], tokenizer_of(kind))
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist() == truth(kind, turns, TOOLS)
    assert rows[0].loss_mask.tolist() == rows[1].loss_mask.tolist()


@pytest.mark.parametrize("name", ["GLM-4.5", "GLM-4.5, TRL"])
def test_what_follows_a_turn_is_opened_also_after_another_opening(name: str) -> None:
    """The policy stopped with `<|user|>`, but called a tool."""
    kind = next(kind for kind in (*KINDS, *WHOLE) if kind.name == name)
    tokenizer = tokenizer_of(kind)
    (row,) = encode_demonstrations([example_of(CHAIN[1:3], TOOLS)], tokenizer, "last")
    wrong = [*parts(row)[-1][:-1], tokenizer.convert_tokens_to_ids("<|user|>")]
    text = tokenizer.decode(reply_tokens(chat_of(tokenizer), wrong, frozenset(), RESULTS[:1], TOOLS, 1000))
    assert text == "<|observation|>\n<tool_response>\nit is 0\n</tool_response><|assistant|>\n"


def test_calls_after_the_end_of_a_turn_are_an_error() -> None:
    """GigaChat 3 writes a call as a message of its own: the policy, which stops before it, can make none."""
    tokens = ("<|role_sep|>", "<|message_sep|>")
    tokenizer = tokenizer_of(Kind("GigaChat 3", "tiktoken", "<|message_sep|>", GIGACHAT3, tokens, eos="</s>"))
    assert chat_of(tokenizer).stop_before_calls(TOOLS) == "<|message_sep|>"
    with pytest.raises(EndpointError, match=r"writes '<\|message_sep\|>', with which generation stops, before the calls"):
        Renderer(tokenizer, "hermes").context(ChatBody(model="policy", messages=CHAIN[1:2], tools=TOOLS), Conversations())
    (row,) = encode_demonstrations([example_of(CHAIN[1:3], TOOLS)], tokenizer)
    assert "stopped" in row.differences
    assert not any(chat_of(tokenizer_of(kind)).stop_before_calls(TOOLS) for kind in (*CALLING_KINDS, *OTHERS, *WHOLE))


def test_each_of_several_templates_has_its_own_end() -> None:
    """Command R+ has one for tools, which writes an instruction after every conversation."""
    kind = TWO_WAYS["Command R+"]
    tokenizer, asked = copy.copy(tokenizer_of(kind)), messages_of(TEXTS["one"])
    tokenizer.chat_template = {
        "default": COMMAND.replace("<|END_RESPONSE|>", "").replace("<|END_OF_TURN|>", "<|END_RESPONSE|>"),
        "tool_use": kind.template,
    }  # type: ignore[assignment]
    learned = {(): "<|START_RESPONSE|>and it<|END_RESPONSE|>", tuple(map(str, TOOLS)): "and it<|END_OF_TURN|>"}
    for tools, text in zip(([], TOOLS), learned.values(), strict=True):
        example = example_of(asked, tools)
        (row,), (prompt,) = encode_demonstrations([example], tokenizer), encode_prompts([example], tokenizer)
        whole = tokenizer.apply_chat_template(asked, tools or None, tokenize=True)["input_ids"]
        assert row.tokens.tolist() == whole and tokenizer.decode(parts(row)[-1]) == text
        assert prompt.tokens.tolist() == whole[: len(prompt)] or tools
        chat, more = chat_of(tokenizer).of(tools), messages_of(["a"])
        opened = tokenizer.apply_chat_template([*asked, *more], tools or None, add_generation_prompt=True)["input_ids"]
        reply = reply_tokens(chat, parts(row)[-1], frozenset(), more, tools, 1000, asked)
        assert reply == opened[-len(reply) :] and tokenizer.decode(reply).startswith("<|START|><|USER|>a")
    ends = tokenizer.convert_ids_to_tokens(chat_of(tokenizer).stops)
    assert set(ends) == {"<|END_RESPONSE|>", "<|END_OF_TURN|>"}


def test_variables_that_the_template_does_not_use_are_an_error() -> None:
    """A comment, a string or a part of a name is no use; one in a `{% generation %}` block is."""
    tokenizer = copy.copy(tokenizer_of(KINDS[0]))
    tokenizer.chat_template = (
        "{# thinking #}{% generation %}{{ 'effort' if enable_thinking else '' }}{% endgeneration %}" + CHATML
    )
    row = {"messages": messages_of(TEXTS["one"])}
    with pytest.raises(DataError, match="expected: an object"):
        demonstration_of(row | {"chat_template_kwargs": "x"}, "row 1", DataConfig(path="x"))
    for name in ("thinking", "effort", "enable_thinking"):
        example = demonstration_of(row | {"chat_template_kwargs": {name: True}}, "row 1", DataConfig(path="x"))
        if name == "enable_thinking":
            assert encode_prompts([example], tokenizer)[0].text.startswith("effort")
        else:
            with pytest.raises(
                DataError, match=rf"'chat_template_kwargs' has \['{name}'\], which the chat template does not"
            ):
                encode_prompts([example], tokenizer)


CALLING = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}]


@pytest.mark.parametrize(
    ("name", "calls", "closing", "end"),
    [
        ("Apriel-1.5", 1, "]</tool_calls>", "\n<|end|>"),
        ("Apriel-1.5", 2, "]</tool_calls>", "\n<|end|>"),
        ("Apriel-1.5, another EOS", 2, "]</tool_calls>", "\n<|end|>"),
        ("Apriel-1.6", 1, "]</tool_calls>", "\n<|end|>"),
        ("Apriel-1.6", 2, "]</tool_calls>", "\n<|end|>"),
        ("Apriel-1.6, another EOS", 1, "]</tool_calls>", "\n<|end|>"),
        ("Command R+", 1, "\n```\n", ""),
        ("Nemotron Nano", 1, "]</TOOLCALL>", "\n<SPECIAL_12>"),
        ("Nemotron Nano, tags of tokens", 2, "]</TOOLCALL>", "\n<SPECIAL_12>"),
    ],
)
def test_a_turn_that_is_written_otherwise_before_others_is_not_repeated(
    name: str, calls: int, closing: str, end: str
) -> None:
    """Truth: what transformers' text of the conversation has after the last call and the end."""
    kind = TWO_WAYS[name]
    tokenizer, chat = tokenizer_of(kind), chat_of(tokenizer_of(kind))
    made = CALLS[:calls]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "it is 5"} for call in made]
    turns = [CALLING[0], {**CALLING[1], "tool_calls": made}]
    (row,) = encode_demonstrations([example_of(turns, TOOLS)], tokenizer)
    (turn,) = parts(row)
    if not end:  # the template writes none, but an instruction that is always the last message
        turn.append(tokenizer.eos_token_id)
    assert is_end(kind, turn[-1]) and not any(is_end(kind, token) for token in turn[:-1])
    whole = tokenizer.decode(truth(kind, [*turns, *results], TOOLS, opened=True))
    before, _, after = whole.rpartition(closing)
    assert before and after.startswith(end)
    reply = reply_tokens(chat, turn, frozenset(), results, TOOLS, 1000)
    assert tokenizer.decode(reply) == after.removeprefix(end)
    results[0]["content"] = "}"  # as the call has
    again = tokenizer.decode(truth(kind, [*turns, *results], TOOLS, opened=True)).rpartition(closing)[2]
    assert tokenizer.decode(reply_tokens(chat, turn, frozenset(), results, TOOLS, 1000)) == again.removeprefix(end)
    results[0]["content"] = "it is 5"
    ended = turn[: len(turn) - len(tokenizer(end)["input_ids"] if tokenizer.decode(turn).endswith(end) else turn[-1:])]
    assert tokenizer.decode(reply_tokens(chat, ended, frozenset(), results, TOOLS, 1000)) == after, "a string ended it"


def test_a_turn_whose_end_is_not_found_before_others_is_an_error() -> None:
    kind = TWO_WAYS["Apriel-1.5"]
    template = kind.template.replace("]</tool_calls>", "{{ ')stop' if last else ']</tool_calls>' }}").replace(
        "{{ '\n' }}<|end|>\n{% endfor %}", "{{ '\n<|end|>\n' if not loop.last or not m.tool_calls }}{% endfor %}"
    )
    chat = chat_of(tokenizer_of(replace(kind, template=template)))
    with pytest.raises(ValueError, match=r"it ends a turn with .*stop.* where no end was found"):
        reply_text(chat, [{"role": "tool", "tool_call_id": CALLS[0]["id"], "name": "f", "content": "it is 5"}], TOOLS)


@pytest.mark.parametrize(
    ("name", "called", "learned"),
    [
        ("Command MoE", False, "<|START_TEXT|>and it<|END_TEXT|><|END_OF_TURN|>"),
        ("Command MoE", True, '<|START_ACTION|>{"name": "f", "arguments": {"a": "x"}}<|END_ACTION|><|END_OF_TURN|>'),
        ("Nemotron Nano", False, "and it\n<SPECIAL_12>"),
        ("Nemotron Nano", True, '<TOOLCALL>[{"name": "f", "arguments": {"a": "x"}}]</TOOLCALL><SPECIAL_12>'),
        ("Nemotron Nano, tags of tokens", True, '<TOOLCALL>[{"name": "f", "arguments": {"a": "x"}}]</TOOLCALL><SPECIAL_12>'),
        ("R1-Distill-Qwen", True, '<|tool_call|>{"name": "f", "arguments": {"a": "x"}}<|tool_call_end|><|end|>'),
        ("Apriel-1.6", False, "and it<|end|>"),
        ("Command R+", True, 'Action:\n{"name": "f", "arguments": {"a": "x"}}\n```\n'),
        ("Command R+", False, "and it<|END_OF_TURN|>"),
    ],
)
def test_the_choice_of_a_call_or_a_text_is_learned(name: str, called: bool, learned: str) -> None:
    kind = TWO_WAYS[name]
    turns = CALLING if called else messages_of(TEXTS["one"])
    (row,) = encode_demonstrations([example_of(turns, TOOLS)], tokenizer_of(kind))
    assert row.tokens.tolist() == learned_truth(kind, turns, TOOLS)
    assert [tokenizer_of(kind).decode(part) for part in parts(row)] == [learned]


@pytest.mark.parametrize("thinking", ["", "so"])
def test_a_turn_starts_after_its_opening_though_thoughts_before_it_are_left_out(thinking: str) -> None:
    """gpt-oss writes thoughts before a call until an answer follows, and those of the last turn."""
    kind, call = next(kind for kind in KINDS if kind.name == "gpt-oss"), "<|start|>assistant to="
    thought = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if m.thinking and CASE }}"
    no_answer = "(messages | selectattr('role', 'equalto', 'assistant') | list | last).tool_calls"
    template = kind.template.replace(call, thought.replace("CASE", no_answer) + call)
    final = "<|start|>assistant<|channel|>final"
    kind = replace(kind, template=template.replace(final, thought.replace("CASE", "loop.last") + final))
    turns = [CALLING[0], {**CALLING[1], "thinking": "it"}, {"role": "tool", "tool_call_id": CALLS[0]["id"], "content": "5"}]
    answer = {"role": "assistant", "content": "and it"} | ({"thinking": thinking} if thinking else {})
    (row,) = encode_demonstrations([example_of([*turns, answer], TOOLS)], tokenizer_of(kind), "last")
    assert row.tokens.tolist() == truth(kind, [*turns, answer], TOOLS)
    thoughts = "<|channel|>analysis<|message|>so<|end|><|start|>assistant" if thinking else ""
    learned = f"{thoughts}<|channel|>final<|message|>and it<|return|>"
    assert [tokenizer_of(kind).decode(part) for part in parts(row)] == [learned]


@pytest.mark.parametrize(("name", "content"), [("R1-Distill-Qwen", None), ("QwQ", "")])
def test_a_call_has_a_content_that_the_template_takes_everywhere(name: str, content: str | None) -> None:
    kind, result = TWO_WAYS[name], {"role": "tool", "tool_call_id": CALLS[0]["id"], "content": "it is 5"}
    for call in ({"content": None}, {}, {"content": ""}):
        turn = {"role": "assistant", "tool_calls": CALLS[:1], **call}
        turns = [CALLING[0], turn, result, {"role": "assistant", "content": "and"}]
        (row,) = encode_demonstrations([example_of(turns, TOOLS)], tokenizer_of(kind))
        assert row.tokens.tolist() == truth(kind, [turns[0], {**turn, "content": content}, *turns[2:]], TOOLS)
        assert all(is_end(kind, part[-1]) and not any(is_end(kind, token) for token in part[:-1]) for part in parts(row))
        assert len(parts(row)) == 2


@pytest.mark.parametrize(("name", "end"), [("Apriel-1.6", "\n<|end|>"), ("Apertus", "<|assistant_end|>")])
def test_turns_before_others_have_the_end_that_only_these_have(name: str, end: str) -> None:
    kind, messages = TWO_WAYS[name], messages_of(TEXTS["one"] * 2)
    tokenizer, chat = tokenizer_of(kind), chat_of(tokenizer_of(kind))
    (row,) = encode_demonstrations([example_of(messages)], tokenizer)
    assert [tokenizer.decode(part) for part in parts(row)] == [f"and it{end}", f"and it{end.strip()}"]
    assert row.tokens.tolist() == learned_truth(kind, messages) and chat.end.text == end
    after = tokenizer.decode(truth(kind, messages[:3], opened=True)).partition("and it")[2]
    for turn, rest in ((parts(row)[0], after.removeprefix(end)), (parts(row)[1], after.removeprefix(end)), ([5], after)):
        assert tokenizer.decode(reply_tokens(chat, turn, frozenset(), messages[2:3], (), 1000)) == rest


@kinds
def test_stops_are_the_ends_of_turns(kind: Kind) -> None:
    ends = tokenizer_of(kind).convert_ids_to_tokens(list(chat_of(tokenizer_of(kind)).end.tokens))
    assert set(ends) == kind.stops or (kind.name == "GLM-4.5" and set(ends) <= kind.stops)


@kinds
def test_a_saved_model_has_the_same_tokenizer_template_and_stops(kind: Kind, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    source, target = tmp_path / "model", tmp_path / "final_model"
    target.mkdir()
    tokenizer.save_pretrained(source)
    policy = PolicyConfig(model_name=str(source), tokenizer=TokenizerConfig(chat_template=kind.template))
    save_tokenizer(policy, load_tokenizer(policy), target)
    again = load_tokenizer(PolicyConfig(model_name=str(target)))
    assert again.chat_template == kind.template and chat_of(again).end == chat_of(tokenizer).end
    text = "".join(kind.stops).replace(" ", "") + " hello  and\nthe 5=5 \u65e5"
    assert again(text)["input_ids"] == load_tokenizer(policy)(text)["input_ids"]
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    stops = json.loads((target / "generation_config.json").read_text())["eos_token_id"]
    assert set(again.convert_ids_to_tokens(stops)) == {kind.eos, *again.convert_ids_to_tokens([*chat_of(again).end.tokens])}


@pytest.mark.parametrize("own", [None, "own " + CHATML])
def test_a_saved_model_has_no_template_for_tools_besides_the_runs_own(own: str | None, tmp_path: Path) -> None:
    tokenizer = copy.copy(tokenizer_of(KINDS[0]))
    tokenizer.chat_template = {"default": CHATML, "tool_use": "tools " + CHATML}  # type: ignore[assignment]
    tokenizer.save_pretrained(tmp_path / "model")
    policy = PolicyConfig(model_name=str(tmp_path / "model"), tokenizer=TokenizerConfig(chat_template=own))
    (tmp_path / "final_model").mkdir()
    save_tokenizer(policy, load_tokenizer(policy), tmp_path / "final_model")
    again = AutoTokenizer.from_pretrained(tmp_path / "final_model")
    assert again.chat_template == load_tokenizer(policy).chat_template == (own or tokenizer.chat_template)


TEXT = st.text(
    st.sampled_from([*"he lo\n5=| \t", "\u00e9", "\u65e5", "\U0001f600", "\u0301", "\u200f", "\x00"]),
    min_size=1,
    max_size=12,
)


@kinds
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    texts=st.lists(TEXT.filter(lambda text: text.strip()), min_size=2, max_size=4).filter(lambda texts: len(texts) % 2 == 0)
)
@example(texts=TEXTS["several"])
@example(texts=TEXTS["spaces"])
@example(texts=TEXTS["unicode"])
@example(texts=TEXTS["long"])
def test_any_text(kind: Kind, texts: list[str]) -> None:
    if kind.name == "an end of plain text":
        texts = [text.replace("|", "l") for text in texts]
    messages, tokenizer = messages_of(texts), tokenizer_of(kind)
    (row,) = encode_demonstrations([example_of(messages)], tokenizer, "all" if kind.again else "last")
    assert row.tokens.tolist() == learned_truth(kind, messages)
    learned, answers = parts(row), texts[1::2] if kind.again else texts[-1:]
    for part, answer in zip(learned, answers, strict=True):
        assert [token for token in part if is_end(kind, token)] == part[-1:], "a turn ends with its end, and has no other"
        text = squeezed(tokenizer.decode(part, skip_special_tokens=True))
        text = text.removesuffix("|") if kind.name == "an end of plain text" else text
        assert text.endswith(squeezed(answer)) or kind.tokenizer == "unigram" or not set(answer).isdisjoint("\x00\u0301")
    for prompt, response in (texts[:2], texts[::-1][:2]):
        (plain,) = encode_demonstrations([Example(prompt, response, source="row 1")], tokenizer)
        (asked,) = encode_prompts([Example(prompt, response, source="row 1")], tokenizer)
        assert plain.tokens[: len(asked)].tolist() == asked.tokens.tolist(), "generation continues the same prompt"
        whole = [token for token in tokenizer(prompt + response)["input_ids"]]
        whole = whole if whole[-1] == tokenizer.eos_token_id else [*whole, tokenizer.eos_token_id]
        if whole[: len(asked)] == asked.tokens.tolist():
            assert plain.tokens.tolist() == whole


def test_a_long_text_is_tokenized_only_until_it_exceeds_the_room() -> None:
    tokenizer, room = character_tokenizer("0123456789"), 6
    for text in ("", "12", "123456", "1" * 30, "1" * 10_000):
        tokens, whole = (
            text_tokens(chat_of(tokenizer), [4], text, room),
            tokenizer(text, add_special_tokens=False)["input_ids"],
        )
        assert tokens == whole if len(whole) <= room else room < len(tokens) <= 50


def test_a_long_reply_fits_if_the_tokenizer_drops_most_characters() -> None:
    tokenizer = character_tokenizer("0123456789")
    tokenizer.backend_tokenizer.normalizer = Replace(" ", "")
    assert text_tokens(chat_of(tokenizer), [4], " " * 10_000 + "12", 6) == [5, 6]


class WithoutOffsets:
    """A tokenizer in Python, such as Kimi's: it has no backend."""

    backend_tokenizer = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._own = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        return self._own(text, **options)

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@kinds
def test_a_tokenizer_without_offsets_has_the_same_edges(kind: Kind) -> None:
    fast, slow = tokenizer_of(kind), cast(PreTrainedTokenizerFast, WithoutOffsets(tokenizer_of(kind)))
    asked, reply = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "the"}]
    for texts in ("several", "unicode"):
        example, turns = example_of(messages_of(TEXTS[texts])), "all" if kind.again else "last"
        (ours,), (theirs,) = (encode_demonstrations([example], tokenizer, turns) for tokenizer in (fast, slow))  # type: ignore[arg-type]
        assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.loss_mask.tolist() == theirs.loss_mask.tolist()
    chats, turn = (chat_of(fast), chat_of(slow)), sampled(kind, asked, "and it")[:-1]
    assert chats[0].end == chats[1].end
    assert reply_tokens(chats[0], turn, frozenset(), reply, (), 1000) == reply_tokens(
        chats[1], turn, frozenset(), reply, (), 1000
    )


@pytest.mark.parametrize(
    ("end", "rest", "loss"),
    [
        ("|", "\n", "5|"),  # a plain token
        ("", "\n<a>", "5"),  # a template that opens the next turn always
        ("", "", "5<eos>"),  # the token with which generation ends
        ("[|]", "\n", "5[|]"),  # several tokens
    ],
)
def test_ends_of_plain_text(end: str, rest: str, loss: str) -> None:
    tokenizer = character_tokenizer(
        "0123456789<>[]|ua\n",
        f"{{% for m in messages %}}<{{{{ m.role[0] }}}}>{{{{ m.content }}}}{end}{rest[:1]}{{% endfor %}}{rest[1:]}",
    )
    (row,) = encode_demonstrations([example_of(messages_of(["1", "5"]))], tokenizer)
    assert tokenizer.decode(row.tokens[row.loss_mask > 0]).endswith(loss)
    assert tokenizer.convert_ids_to_tokens(list(chat_of(tokenizer).end.tokens)) == ([end] if len(end) == 1 else [])
    assert chat_of(tokenizer).end.text == end


def test_a_turn_ends_at_the_eos_token() -> None:
    """Generation never passes it, although this template opens each question before it is asked."""
    tokenizer = character_tokenizer(
        "0123456789<>ua\n",
        "<u>{% for m in messages %}{{ m.content }}{{ '<a>' if m.role == 'user' else eos_token + '\n<u>' }}{% endfor %}",
    )
    (row,) = encode_demonstrations([example_of(messages_of(["1", "5", "2", "6"]))], tokenizer)
    assert [tokenizer.decode(part) for part in parts(row)] == ["5<eos>", "6<eos>"]
    assert chat_of(tokenizer).end.text == "<eos>" and reply_text(chat_of(tokenizer), messages_of(["3"])) == "\n<u>3<a>"


@pytest.mark.parametrize("kind", CALLING_KINDS, ids=lambda kind: kind.name)
def test_results_of_several_calls_follow_a_turn(kind: Kind) -> None:
    """Also with templates that take one call of a turn: the policy made them."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"it is {call['id']}"} for call in CALLS]
    text = reply_text(chat_of(tokenizer_of(kind)), results)
    assert [text.count(result["content"]) for result in results] == [1, 1]


def test_messages_of_openais_format_have_one_rendering() -> None:
    """As data reads them, also where an environment replies with them."""
    chat = chat_of(tokenizer_of(KINDS[0]))
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    openai = [{"role": "developer", "content": parts, "name": None}, {"role": "user", "content": "hello"}]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (prompt,) = encode_prompts([example_of([*openai, {"role": "assistant", "content": "it"}])], chat.tokenizer)
    body = ChatBody(model="policy", messages=openai)
    assert prompt.tokens.tolist() == truth(KINDS[0], plain, opened=True)
    assert Renderer(chat.tokenizer, "hermes").context(body, Conversations()).whole() == prompt.tokens.tolist()
    assert reply_text(chat, openai) == reply_text(chat, plain)


@pytest.mark.parametrize(("prompt", "response"), [("it\n", "\nand"), ("it  ", "  and"), ("it\n", "\n")])
def test_runs_of_white_space_that_are_added_tokens_are_text(prompt: str, response: str) -> None:
    """As Gemma 3's, OLMo's and GPT-NeoX's are."""
    tokenizer = character_tokenizer("adint \n", chat_template=None)
    tokenizer.add_tokens(["\n\n", "    "])
    (row,) = encode_demonstrations([Example(prompt, response, source="row 1")], tokenizer)
    learned = [token for token, mask in zip(row.tokens, row.loss_mask, strict=True) if mask]
    assert tokenizer.decode(row.tokens, skip_special_tokens=True) == prompt + response
    assert tokenizer.decode(learned, skip_special_tokens=True) == response


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.again], ids=lambda kind: kind.name)
def test_marks_teach_no_more_than_what_is_sampled(kind: Kind) -> None:
    """Marks around all that the template writes: headers, other turns, what follows an end."""
    example, tokenizer = example_of(messages_of(TEXTS["several"])), copy.copy(tokenizer_of(kind))
    plain = re.sub("{% (end)?generation %}", "", kind.template)
    rows = []
    for template in (plain, f"{{% generation %}}{plain}{{% endgeneration %}}"):
        tokenizer.chat_template = template
        rows += encode_demonstrations([example], tokenizer)
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist() and rows[0].loss_mask.tolist() == rows[1].loss_mask.tolist()


@pytest.mark.parametrize("texts", [["a", "", "hello", ""], ["a", "and", "hello", ""]])
@pytest.mark.parametrize("thought", ["", "{% generation %}{{ m.reasoning_content }}{% endgeneration %}"])
def test_empty_turns_with_marks_around_the_text_teach_the_end(texts: list[str], thought: str) -> None:
    tokenizer = copy.copy(tokenizer_of(KINDS[0]))
    before = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + thought
    after = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.chat_template = before + "{% generation %}{{ m.content }}{% endgeneration %}" + after
    (row,) = encode_demonstrations([example_of(messages_of(texts))], tokenizer)
    assert [tokenizer.decode(part) for part in parts(row)] == [text + "<|im_end|>" for text in texts[1::2]]


@pytest.mark.parametrize(
    ("name", "opening", "learned"),
    [
        # an earlier turn has no thought, which prompts open
        ("Qwen3", "<think>\n", ["the hello<|im_end|>", "</think>\n\nand<|im_end|>"]),
        ("Qwen3", "", ["the hello<|im_end|>", "<think>\n\n</think>\n\nand<|im_end|>"]),
        # <|end|> is no stop: generation samples <|return|>, which the template writes after the last turn only
        ("gpt-oss", "", ["<|channel|>final<|message|>the hello", "<|channel|>final<|message|>and<|return|>"]),
    ],
)
def test_marks_around_turns_that_the_template_rewrites(name: str, opening: str, learned: list[str]) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    tokenizer = copy.copy(tokenizer_of(kind))
    before, loop, rest = kind.template.rpartition("{% for m in messages %}")
    body, end, prompt = rest.partition("{% endfor %}{% if add_generation_prompt %}")
    marked = f"{{% if m.role == 'assistant' %}}{{% generation %}}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}"
    tokenizer.chat_template = before + loop + marked + end + prompt.replace("assistant\n", f"assistant\n{opening}")
    (row,) = encode_demonstrations([example_of(messages_of(["hello", "the hello", "a", "and"]))], tokenizer)
    assert [tokenizer.decode(part) for part in parts(row)] == learned


@pytest.mark.parametrize("thought", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("weight", [0, 1])
def test_a_turn_of_which_the_template_leaves_nothing_takes_no_marks_of_the_next(weight: int, thought: str) -> None:
    tokenizer = copy.copy(tokenizer_of(KINDS[0]))
    text = "{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% endgeneration %}"
    body = f"{{% if m.role == 'assistant' %}}{thought}{text}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    loop = f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{body}<|im_end|>\n{{% endfor %}}"
    tokenizer.chat_template = loop + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    messages = messages_of(["hello", "<think>the</think>", "a", "<think>the</think>and", "it", "the hello"])
    messages[3]["weight"] = weight
    (row,) = encode_demonstrations([example_of(messages)], tokenizer)
    learned = ["<|im_end|>", *["and<|im_end|>"] * weight, "the hello<|im_end|>"]
    assert [tokenizer.decode(part) for part in parts(row)] == learned


@pytest.mark.parametrize("kind", ["tiktoken", "gpt2", "legacy", "unigram"])
@pytest.mark.parametrize("sampled", ["and", "and <", "and<|im_", "and<|im_end|>", "and<|im_end|>\n"])
def test_a_string_that_ended_a_turn_is_not_repeated(kind: str, sampled: str) -> None:
    """ChatML on tokenizers that have no such tokens: `>` and the newline after it may be one."""
    tokenizer = tokenizer_of(Kind("plain", kind, "", CHATML, eos="</s>"))
    chat = chat_of(tokenizer)
    messages = messages_of(["hello", "and" + " <" * (sampled == "and <"), "the"])
    prompt, whole = (chat.render(messages[:end], opened=True) for end in (1, 3))
    assert whole == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turn = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode([*turn, *reply_tokens(chat, turn, frozenset(), messages[2:], (), 1000)])
    if sampled == "and <":  # as much may be the start of the end, and is
        assert squeezed(text) in (
            squeezed(whole.removeprefix(prompt)),
            squeezed(whole.removeprefix(prompt).replace("<<", "<")),
        )
    else:
        assert squeezed(text) == squeezed(whole.removeprefix(prompt))
    assert chat.turn_text(turn).strip() == (sampled if sampled.endswith(("<", "_")) else "and")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.tools], ids=lambda kind: kind.name)
@pytest.mark.parametrize("what", ["call", "result"])
def test_what_a_template_leaves_out_is_an_error(kind: Kind, what: str) -> None:
    asked, answer = messages_of(["hello", "and it"])
    calling = {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}
    result = {"role": "tool", "tool_call_id": CALLS[0]["id"], "name": "f", "content": "it is 5"}
    messages = [asked, calling] if what == "call" else [asked, answer, result, answer]
    try:
        (row,) = encode_demonstrations([example_of(messages)], tokenizer_of(kind), "last")
    except DataError as error:
        assert "the chat template rejects the conversation" in str(error)
    else:
        assert what == "result" and "it is 5" in tokenizer_of(kind).decode(row.tokens)
        return
    (other,) = encode_demonstrations([example_of([asked, answer])], tokenizer_of(kind), "last")
    assert len(other) > 0


@pytest.mark.parametrize(
    ("name", "content", "calls", "lost"),
    [
        ("gpt-oss", None, CALLS, "all calls of a turn but one"),
        ("R1-Distill", "hello", CALLS[:1], "tool calls of a turn with a text"),
    ],
)
def test_calls_that_a_template_leaves_out_are_an_error(name: str, content: str | None, calls: list[Any], lost: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": content, "tool_calls": calls}]
    with pytest.raises(DataError, match=f"row 1: the chat template rejects the conversation: it leaves out {lost}"):
        encode_demonstrations([example_of(messages)], tokenizer_of(kind))


ONE_SYSTEM = (
    "{%% set systems = messages | selectattr('role', 'equalto', 'system') | list %%}{{ (systems | %s).content if systems }}"
    "{%% for m in messages if m.role != 'system' %%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


@pytest.mark.parametrize("written", ["first", "last"])
def test_system_messages_that_a_template_leaves_out_are_an_error(written: str) -> None:
    """gpt-oss writes the first one alone, R1 the last."""
    tokenizer = copy.copy(tokenizer_of(KINDS[0]))
    tokenizer.chat_template = ONE_SYSTEM % written
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "5"}]
    one, other = ({"role": "system", "content": text} for text in ("be kind", "be brief"))
    for messages in ([one, other, *turns], [one, *turns, other, *turns]):
        with pytest.raises(DataError, match="it leaves out a system message besides another one"):
            encode_demonstrations([example_of(messages)], tokenizer)
    (row,) = encode_demonstrations([example_of([one, *turns])], tokenizer)
    assert "be kind" in tokenizer.decode(row.tokens)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_calls_are_none(kind: Kind) -> None:
    asked, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "5"}
    tokenizer = tokenizer_of(kind)
    rows = [encode_demonstrations([example_of([asked, answer | more])], tokenizer) for more in ({}, {"tool_calls": []})]
    assert rows[0][0].tokens.tolist() == rows[1][0].tokens.tolist()


def test_a_tokenizer_may_have_a_template_for_tools() -> None:
    """As Command R's and Hermes'. The other one knows no calls."""
    tokenizer = copy.copy(tokenizer_of(KINDS[0]))
    tokenizer.chat_template = cast(str, {"default": CHATML.replace("m.tool_calls or []", "[]"), "tool_use": CHATML})
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": CALLS}]
    (row,) = encode_demonstrations([example_of(messages, TOOLS)], tokenizer)
    assert row.tokens.tolist() == truth(KINDS[0], [messages[0], {**messages[1], "content": ""}], TOOLS)
    with pytest.raises(DataError, match="it leaves out tool calls"):
        encode_demonstrations([example_of(messages)], tokenizer)


def test_an_end_of_calls_is_not_written_twice() -> None:
    kind = next(kind for kind in KINDS if kind.name == "gpt-oss")
    kind = replace(kind, template=kind.template.replace("<|call|>", "<|call|>\n"))
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}]
    (row,) = encode_demonstrations([example_of(messages, TOOLS)], tokenizer_of(kind))
    assert row.tokens.tolist() == truth(kind, messages, TOOLS)


def test_rows_that_teach_nothing_are_known() -> None:
    """Nemotron Nano v2 leaves out an empty answer at the end."""
    kind = next(kind for kind in KINDS if kind.name == "Qwen2.5")
    shown_turns = "{% for m in messages if m.content or m.role != 'assistant' %}"
    kind = replace(kind, template=kind.template.replace("{% for m in messages %}", shown_turns))
    (row,) = encode_demonstrations([example_of(messages_of(["hello", ""]))], tokenizer_of(kind))
    assert not row.loss_mask.any() and "empty" in row.differences


def test_lost_texts_of_learned_turns_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    question, answer = messages_of(["hello", "and it"])
    examples = [example_of([question, {**answer, "reasoning_content": thought}]) for thought in ("hm", None, "hm hm")]
    warn_of_differences(encode_demonstrations(examples, tokenizer_of(KINDS[1])))
    assert not caplog.text, "Qwen3 writes the thought of the last turn"
    warn_of_differences(encode_demonstrations(examples, tokenizer_of(KINDS[0])))
    assert "row 1 and 1 other conversations: the chat template leaves out texts of turns that are learned" in caplog.text
    (row,) = encode_demonstrations([example_of([question, {**answer, "reasoning": "hm"}])], tokenizer_of(KINDS[1]))
    assert "left out" in row.differences, "Qwen3's template knows the thought by another name"


def test_a_system_prompt_may_move() -> None:
    """Mistral's is a part of the last question: of a prompt, but of no finished conversation."""
    system = "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    template = system + MISTRAL1.replace("'[INST] ' +", "'[INST] ' + (system if loop.last else '') +")
    kind = replace(next(kind for kind in KINDS if kind.name == "Mistral v1"), template=template)
    messages = [{"role": "system", "content": "be it"}, *messages_of(["hello", "and it"])]
    (prompt,), (row,) = (
        encode([example_of(messages)], tokenizer_of(kind)) for encode in (encode_prompts, encode_demonstrations)
    )
    assert prompt.tokens.tolist() == truth(kind, messages[:2], opened=True) and "be it" in prompt.text
    assert row.tokens.tolist() == truth(kind, messages)
    assert tokenizer_of(kind).decode(parts(row)[0]).strip() == "and it</s>"


@pytest.mark.parametrize(("arguments", "same"), [("", {}), (None, {}), ("{}", {}), ({}, {}), ('"x"', '"x"')])
def test_arguments_may_be_missing_or_a_text(arguments: Any, same: Any) -> None:
    """As vLLM reads them. The truth is the template's text of an empty object, and of a text, which is JSON already."""
    kind, question = KINDS[0], {"role": "user", "content": "hello"}
    given, plain = (
        {"role": "assistant", "content": "", "tool_calls": [{**CALLS[0], "function": {"name": "f", "arguments": value}}]}
        for value in (arguments, same)
    )
    (row,) = encode_demonstrations([example_of([question, given], TOOLS)], tokenizer_of(kind), "last")
    assert row.tokens.tolist() == truth(kind, [question, plain], TOOLS)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("Qwen3", {"enable_thinking": False}),
        ("Llama 3.1, dated", {"date_string": "1 May", "hello": None}),
        ("marked", {"x": "h"}),
    ],
)
def test_rows_have_variables_of_the_template(name: str, variables: dict[str, Any]) -> None:
    """As TRL's: of a row of SFT, a preference and a prompt, and where an environment replies to it."""
    kind = next(kind for kind in KINDS if kind.name == name.replace("marked", "Qwen2.5"))
    tokenizer = copy.copy(tokenizer_of(kind))
    if kind.name != "Llama 3.1, dated":
        opening = "{% if add_generation_prompt %}<|im_start|>assistant\n"
        tokenizer.chat_template = kind.template.replace(
            opening, opening + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        )
    if name == "marked":
        tokenizer.chat_template = "{{ x }}{% generation %}" + kind.template + "{% endgeneration %}"
    messages = messages_of(TEXTS["one"])
    content = {"messages": messages, "chat_template_kwargs": variables}
    example = demonstration_of(content, "row 1", DataConfig(path="x"))
    (row,), (prompt,) = encode_demonstrations([example], tokenizer), encode_prompts([example], tokenizer)
    given = {key: value for key, value in variables.items() if value is not None}
    whole = tokenizer.apply_chat_template(messages, tokenize=True, **given)["input_ids"]
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=True, add_generation_prompt=True, **given)["input_ids"]
    assert row.tokens.tolist() == whole and prompt.tokens.tolist() == opened != truth(kind, messages[:1], opened=True)
    assert with_opening(prompt, messages[:1], tokenizer).tokens.tolist() == opened
    pair = {"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:], "chat_template_kwargs": variables}
    (both,) = encode_preferences([preference_of(pair, "row 1", DataConfig(path="x"))], tokenizer)
    assert both.chosen.tokens.tolist() == both.rejected.tokens.tolist() == whole


def test_a_template_may_write_none() -> None:
    """It is found out how it takes calls, although its own text looks like a content or a list of Python."""
    kind = next(kind for kind in KINDS if kind.name == "R1-Distill")
    tokenizer = copy.copy(tokenizer_of(kind))
    tokenizer.chat_template = "Effort: None {'a': 1}\n" + kind.template
    question, call = {"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}
    assert 'f\n{"a": "x"}<|tool_call_end|>' in chat_of(tokenizer).render([question, call], opened=False)


def test_contents_are_parts_if_the_template_takes_no_texts() -> None:
    """As SmolVLM's and LLaVA's."""
    kind = replace(
        KINDS[0],
        name="parts",
        template=KINDS[0].template.replace("m.content or ''", "m.content[0].text if m.content is not string else ''"),
    )
    messages = messages_of(TEXTS["several"])
    (row,) = encode_demonstrations([example_of(messages)], tokenizer_of(kind))
    given = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert row.tokens.tolist() == truth(kind, given) == truth(KINDS[0], messages)


def test_edges_without_offsets_take_one_pass() -> None:
    """Kimi's tokenizer has none. The work of it is linear in the text: neither a prefix nor the text is tokenized again."""
    seen: list[int] = []

    class Counted(WithoutOffsets):
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return super().__call__(text, **options)

    tokenizer = tokenizer_of(next(kind for kind in KINDS if kind.name == "Kimi"))
    text = "hello and \u65e5\U0001f600 " * 300
    (ours,), (theirs,) = (TextEncoder(made).encode([text]) for made in (Counted(tokenizer), tokenizer))  # type: ignore[arg-type]
    edges = [theirs.start(number) for number in range(len(theirs.ids) + 1)]
    assert [ours.start(number) for number in range(len(ours.ids) + 1)] == edges
    assert [*map(ours.cut, edges)] == [*map(theirs.cut, edges)] and seen == [len(text)]


@st.composite
def conversations(draw: st.DrawFn, kind: Kind) -> list[dict[str, Any]]:
    """Turns of users and the assistant; with tools, turns that call them, alone or in parallel, once or again."""
    word = st.sampled_from(["hello", "it 5=5", "and\nthe", "\u65e5", "a", '{"a": "<b>"}', "x \u00e9"])
    text = st.lists(word, min_size=1, max_size=3).map(" ".join)
    turns, number = list[dict[str, Any]](), 0
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(text)})
        for _ in range(draw(st.integers(0, 2)) if kind.tools else 0):
            count = draw(st.integers(1, 1 if "tool_calls[0]" in kind.template or kind.name == "R1-Distill" else 3))
            calls = [{"id": f"{number + place:09}", "type": "function"} for place in range(count)]
            calls = [{**call, "function": {"name": "f", "arguments": json.dumps({"a": draw(text)})}} for call in calls]
            turns.append({"role": "assistant", "content": None, "tool_calls": calls})
            turns += [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": draw(text)} for call in calls]
            number += count
        turns.append({"role": "assistant", "content": draw(text)})
    return turns if draw(st.booleans()) or len(turns) == 2 or not kind.tools else _to_a_call(turns)


def _to_a_call(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ends = [number for number, turn in enumerate(turns, start=1) if turn["role"] == "assistant"]
    return turns[: ends[-2]]


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS, *WHOLE], ids=lambda kind: kind.name)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_conversation(kind: Kind, data: st.DataObject) -> None:
    messages, tokenizer = data.draw(conversations(kind)), tokenizer_of(kind)
    tools = TOOLS if kind.tools else []
    example = example_of(messages, tools)
    (row,), (prompt,) = encode_demonstrations([example], tokenizer, "last"), encode_prompts([example], tokenizer)
    missing = kind.name == "R1-Distill" and bool(messages[-1].get("tool_calls"))  # its template ends parallel calls only
    whole = learned_truth(kind, shown(kind, messages), tools)
    assert row.tokens.tolist() == [*whole, *[tokenizer.eos_token_id] * missing]
    assert prompt.tokens.tolist() == truth(kind, shown(kind, messages[:-1]), tools, opened=True)
    (turn,) = parts(row)
    assert is_end(kind, turn[-1]) and not any(is_end(kind, token) for token in turn[:-1])

    if kind.opens_alike:
        assert [*prompt.tokens.tolist(), *turn] == row.tokens[: len(prompt) + len(turn)].tolist()
    elif kind in KINDS and not any("tool_calls" in message for message in messages):
        # a thought that the template leaves out of turns, or a newline that is a token with that of the turn
        assert {"opened", "joined"} & set(row.differences)
    body = ChatBody(model="policy", messages=messages[:-1], tools=tools)
    assert Renderer(tokenizer, "hermes").context(body, Conversations()).whole() == prompt.tokens.tolist()


@kinds
def test_agents_and_environments_continue_alike(kind: Kind) -> None:
    """An agent sends back what it got as OpenAI's client writes it; an environment gives messages, first and as a reply."""
    tokenizer, chat = tokenizer_of(kind), chat_of(tokenizer_of(kind))
    asked, _, more = messages_of(["hello", "and it", "the hello"])
    (prompt,) = encode_prompts(
        [example_of([{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}])], tokenizer
    )
    renderer, agent = Renderer(tokenizer, "hermes"), Conversations()
    context = renderer.context(ChatBody(model="policy", messages=[asked]), agent)
    assert context.whole() == truth(kind, [asked], opened=True) == with_opening(prompt, [asked], tokenizer).tokens.tolist()
    turn = sampled(kind, [asked], "and it")
    said = {"role": "assistant", "content": renderer.text(turn)}
    result = FinishedRequest(0, turn, [0.0] * len(turn), [0] * len(turn), "stop")
    agent.add(Answer(context, result, message_key(said), trained=True))
    again = [
        asked,
        {**said, "refusal": None, "tool_calls": None},
        {**more, "content": [{"type": "text", "text": more["content"]}]},
    ]
    following = renderer.context(ChatBody(model="policy", messages=again), agent)
    assert following.after is agent.answers[0]
    assert list(following.tokens) == reply_tokens(chat, turn, frozenset(), [more], (), 1000)
