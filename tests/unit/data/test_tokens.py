"""Tokens are exact: for tokenizers and templates in the shapes of published ones, rows have the tokens of `transformers`.

Truths: `apply_chat_template(tokenize=True)` of the whole conversation, and the token that ends a turn by the model's
documentation. The mask is checked against the text: what the template writes between the prompt and that token.
"""

import copy
import json
import pickle
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
from dagrl.data import Example, tokenization
from dagrl.data.chat import Chat, chat_of
from dagrl.data.encoder import TextEncoder
from dagrl.data.examples import demonstration_of, preference_of
from dagrl.data.replies import reply_row, reply_text, text_tokens
from dagrl.data.tokenization import Demonstration, encode_demonstrations, encode_prompts
from dagrl.data.tokenizer_copies import copies_share_models, packed, unpacked
from dagrl.errors import DataError
from dagrl.rl.agents.conversations import Answer, Conversations, message_key
from dagrl.rl.agents.protocol import ChatBody, EndpointError
from dagrl.rl.agents.rendering import Renderer
from dagrl.rl.generation import FinishedRequest
from dagrl.run.model import character_tokenizer, load_tokenizer, save_tokenizer
from tests.unit.data.published import CHATML, COMMAND, GIGACHAT3, KINDS, MISTRAL1, TWO_WAYS, WHOLE, Kind, tokenizer_of

TEXTS = {
    "one": ["hello", "and it"],
    "several": ["hello it 5=5", "the hello and the\nit", "a\n\nb", "and"],
    "spaces": [" it ", "  hello\n", "the", " and"],
    "unicode": ["👩\u200d👧 😀", "日本語 e\u0301 éé", "\u0627\u0644\u0639\u0631", "\u200f\u05e9 \x07\x1f"],
    "long": ["the and it " * 300, "hello " * 300],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
FUNCTIONS = [{"name": "f", "arguments": {"a": letter}} for letter in "xy"]
CALLS = [{"id": f"{number:09}", "type": "function", "function": function} for number, function in enumerate(FUNCTIONS)]
AS_TEXT = [{**call, "function": {"name": "f", "arguments": json.dumps(call["function"]["arguments"])}} for call in CALLS]
RESULTS = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": f"it is {call['id'][-1]}"} for call in CALLS]
QUESTION = {"role": "user", "content": "hello"}
CALLING = [QUESTION, {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}]
SAID = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in AS_TEXT]
CHAIN = [{"role": "system", "content": "the"}, QUESTION, SAID[0], RESULTS[0], SAID[1], RESULTS[1]]
CHAIN += [{"role": "assistant", "content": "and it"}, {"role": "user", "content": "a"}]
NAMED = {kind.name: kind for kind in (*KINDS, *TWO_WAYS.values(), *WHOLE)}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
CALLING_KINDS = {kind.template: kind for kind in KINDS if kind.tools}.values()
OTHERS = [TWO_WAYS[name] for name in ("Apriel-1.5", "Apriel-1.6", "Apertus", "Command MoE", "Nemotron Nano", "QwQ")]


def messages_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


def example_of(messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> Example:
    return demonstration_of({"messages": list(messages), "tools": list(tools) or None}, "row 1", DataConfig(path="x"))


def encoded(tokenizer: Any, messages: Any, tools: Any = (), turns: Any = "all") -> Demonstration:
    """The only row of a conversation."""
    tokenizer = tokenizer_of(tokenizer) if isinstance(tokenizer, Kind) else tokenizer
    (row,) = encode_demonstrations([example_of(messages, tools)], tokenizer, turns)
    return row


def with_template(template: Any, kind: Kind = KINDS[0]) -> PreTrainedTokenizerFast:
    tokenizer = copy.copy(tokenizer_of(kind))
    tokenizer.chat_template = template
    return tokenizer


def reply_tokens(chat: Chat, turn: Any, said: Any, tools: Any = (), known: Any = (), stops: Any = ()) -> list[int]:
    """The tokens of a reply, for models that take no images."""
    return reply_row(chat, turn, frozenset(stops), said, tools, 1000, known)[0]


def finished(turn: list[int]) -> FinishedRequest:
    return FinishedRequest(0, turn, [0.0] * len(turn), [0] * len(turn), "stop")


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


def learned_in(tokenizer: Kind | PreTrainedTokenizerFast, row: Demonstration) -> list[str]:
    tokenizer = tokenizer_of(tokenizer) if isinstance(tokenizer, Kind) else tokenizer
    return [tokenizer.decode(part) for part in parts(row)]


def squeezed(text: str) -> str:
    """The text as all tokenizers give it back: composed and without spaces."""
    return "".join(normalize("NFC", text).split())


def is_end(kind: Kind, token: int) -> bool:
    return tokenizer_of(kind).convert_ids_to_tokens(token) in kind.stops


def sampled(kind: Kind, before: list[dict[str, Any]], text: str) -> list[int]:
    """A turn as generation samples it: the text's own tokens and the end."""
    (turn,) = parts(encoded(kind, [*before, {"role": "assistant", "content": text}], turns="last"))
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
    reply = reply_tokens(chat, turn, [more], stops=(other, text))
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
    results, rows, requests = RESULTS[: len(calls)], [], []
    for form in (calls, AS_TEXT[: len(calls)]):
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
    (turn,) = parts(encoded(kind, turns[:2], TOOLS, "last"))
    assert [*prompt_tokens, *turn, *reply_tokens(chat, turn, results, TOOLS)] == requests[0]
    rest = requests[0][len(prompt_tokens) + len(turn) :]
    if kind.writes_end:
        assert reply_tokens(chat, turn[:-1], results, TOOLS) == [turn[-1], *rest], "a string ended it"


@kinds
def test_an_agent_may_ask_again_without_a_message(kind: Kind) -> None:
    tokenizer, agent = tokenizer_of(kind), Conversations()
    renderer, turns = Renderer(tokenizer, "hermes"), messages_of(TEXTS["one"])
    context = renderer.context(ChatBody(model="policy", messages=turns[:1]), agent)
    turn = sampled(kind, turns[:1], "and it")
    agent.add(Answer(context, finished(turn), message_key(turns[1]), trained=True))
    following = renderer.context(ChatBody(model="policy", messages=turns), agent)
    whole, reply = truth(kind, turns, opened=True), list(following.tokens)
    assert whole[len(whole) - len(reply) :] == reply == reply_tokens(chat_of(tokenizer), turn, [])
    if kind.again and kind.opens_alike and kind.writes_end:
        assert following.whole() == whole


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
        turn = parts(encoded(kind, messages[: place + 1], TOOLS, "last"))[-1]
        agent.add(Answer(context, finished(turn), message_key(message), trained=True))
        following = renderer.context(ChatBody(model="policy", messages=sent[: place + 2], tools=TOOLS), agent)
        known.append({"role": "assistant", "content": renderer.text(turn)})
        assert list(following.tokens) == reply_tokens(chat, turn, [messages[place + 1]], TOOLS, known)
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
    turns, row = CHAIN[1:3], encoded(tokenizer, CHAIN[1:3], TOOLS)
    (sampled,), ends = parts(row), tokenizer([rest, stop]).input_ids
    turn = [*sampled[:-1], *ends[1]] if other else sampled[: -1 - len(ends[0])]
    assert tokenizer.convert_ids_to_tokens(turn[-1]) == stop
    whole = truth(kind, shown(kind, [*turns, RESULTS[0]]), TOOLS, opened=True)
    reply = reply_tokens(chat_of(tokenizer), turn, RESULTS[:1], TOOLS, stops=turn[-1:])
    assert reply == whole[int(row.loss_mask.argmax()) + len(turn) :]


@pytest.mark.parametrize("name", ["Gemma 4", "gpt-oss", "GLM-4.5, TRL", "Apertus, tools", "Kimi K2"])
def test_a_question_may_follow_a_call(name: str) -> None:
    kind = NAMED[name]
    tokenizer = tokenizer_of(kind)
    row, more = encoded(kind, CHAIN[1:3], TOOLS, "last"), CHAIN[-1:]
    reply = reply_tokens(chat_of(tokenizer), parts(row)[-1], more, TOOLS)
    whole = truth(kind, shown(kind, [*CHAIN[1:3], *more]), TOOLS, opened=True)
    if name == "Apertus, tools":  # the end of the assistant's turns, of which calls are a part
        assert [tokenizer.eos_token_id, *reply[1:]] == reply
    assert [*row.tokens.tolist(), *reply] == whole


@pytest.mark.parametrize("ids", [("call_1", "call_2"), (None, None), ("call_1", "000000000"), ("abcdefghi", "call_2")])
@pytest.mark.parametrize("parallel", [False, True])
def test_mistrals_templates_take_openais_ids(ids: tuple[str | None, str | None], parallel: bool) -> None:
    """Their templates reject those of other than nine letters or digits; without any, results are in the order of calls."""
    kind = NAMED["Mistral v3"]
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
    kind = NAMED[name]
    tokenizer = tokenizer_of(kind)
    wrong = [*parts(encoded(kind, CHAIN[1:3], TOOLS, "last"))[-1][:-1], tokenizer.convert_tokens_to_ids("<|user|>")]
    text = tokenizer.decode(reply_tokens(chat_of(tokenizer), wrong, RESULTS[:1], TOOLS))
    assert text == "<|observation|>\n<tool_response>\nit is 0\n</tool_response><|assistant|>\n"


def test_calls_after_the_end_of_a_turn_are_an_error() -> None:
    """GigaChat 3 writes a call as a message of its own: the policy, which stops before it, can make none."""
    tokens = ("<|role_sep|>", "<|message_sep|>")
    tokenizer = tokenizer_of(Kind("GigaChat 3", "tiktoken", "<|message_sep|>", GIGACHAT3, tokens, eos="</s>"))
    assert chat_of(tokenizer).stop_before_calls(TOOLS) == "<|message_sep|>"
    with pytest.raises(EndpointError, match=r"writes '<\|message_sep\|>', with which generation stops, before the calls"):
        Renderer(tokenizer, "hermes").context(ChatBody(model="policy", messages=CHAIN[1:2], tools=TOOLS), Conversations())
    assert "stopped" in encoded(tokenizer, CHAIN[1:3], TOOLS).differences
    assert not any(chat_of(tokenizer_of(kind)).stop_before_calls(TOOLS) for kind in (*CALLING_KINDS, *OTHERS, *WHOLE))


def test_each_of_several_templates_has_its_own_end() -> None:
    """Command R+ has one for tools, which writes an instruction after every conversation."""
    kind = NAMED["Command R+"]
    plain = COMMAND.replace("<|END_RESPONSE|>", "").replace("<|END_OF_TURN|>", "<|END_RESPONSE|>")
    tokenizer = with_template({"default": plain, "tool_use": kind.template}, kind)
    asked = messages_of(TEXTS["one"])
    learned = {(): "<|START_RESPONSE|>and it<|END_RESPONSE|>", tuple(map(str, TOOLS)): "and it<|END_OF_TURN|>"}
    for tools, text in zip(([], TOOLS), learned.values(), strict=True):
        example = example_of(asked, tools)
        (row,), (prompt,) = encode_demonstrations([example], tokenizer), encode_prompts([example], tokenizer)
        whole = tokenizer.apply_chat_template(asked, tools or None, tokenize=True)["input_ids"]
        assert row.tokens.tolist() == whole and tokenizer.decode(parts(row)[-1]) == text
        assert prompt.tokens.tolist() == whole[: len(prompt)] or tools
        chat, more = chat_of(tokenizer).of(tools), messages_of(["a"])
        opened = tokenizer.apply_chat_template([*asked, *more], tools or None, add_generation_prompt=True)["input_ids"]
        reply = reply_tokens(chat, parts(row)[-1], more, tools, asked)
        assert reply == opened[-len(reply) :] and tokenizer.decode(reply).startswith("<|START|><|USER|>a")
    ends = tokenizer.convert_ids_to_tokens(chat_of(tokenizer).stops)
    assert set(ends) == {"<|END_RESPONSE|>", "<|END_OF_TURN|>"}


def test_variables_that_the_template_does_not_use_are_an_error() -> None:
    """A comment, a string or a part of a name is no use; one in a `{% generation %}` block is."""
    effort = "{# thinking #}{% generation %}{{ 'effort' if enable_thinking else '' }}{% endgeneration %}"
    tokenizer = with_template(effort + CHATML)
    row = {"messages": messages_of(TEXTS["one"])}
    with pytest.raises(DataError, match="expected: an object"):
        demonstration_of(row | {"chat_template_kwargs": "x"}, "row 1", DataConfig(path="x"))
    for name in ("thinking", "effort", "enable_thinking"):
        example = demonstration_of(row | {"chat_template_kwargs": {name: True}}, "row 1", DataConfig(path="x"))
        if name == "enable_thinking":
            assert encode_prompts([example], tokenizer)[0].text.startswith("effort")
        else:
            with pytest.raises(DataError, match=rf"_kwargs' has \['{name}'\], which the chat template does not"):
                encode_prompts([example], tokenizer)


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
def test_a_turn_written_otherwise_before_others_is_not_repeated(name: str, calls: int, closing: str, end: str) -> None:
    """Truth: what transformers' text of the conversation has after the last call and the end."""
    kind = NAMED[name]
    tokenizer, chat = tokenizer_of(kind), chat_of(tokenizer_of(kind))
    turns = [QUESTION, {**CALLING[1], "tool_calls": CALLS[:calls]}]
    (turn,) = parts(encoded(kind, turns, TOOLS))
    if not end:  # the template writes none, but an instruction that is always the last message
        turn.append(tokenizer.eos_token_id)
    assert is_end(kind, turn[-1]) and not any(is_end(kind, token) for token in turn[:-1])
    for first in ("}", "it is 5"):  # as the call has, or not
        results = [{**RESULTS[0], "content": first}, *RESULTS[1:calls]]
        before, _, after = tokenizer.decode(truth(kind, [*turns, *results], TOOLS, opened=True)).rpartition(closing)
        assert before and after.startswith(end)
        assert tokenizer.decode(reply_tokens(chat, turn, results, TOOLS)) == after.removeprefix(end)
    ended = turn[: len(turn) - len(tokenizer(end)["input_ids"] if tokenizer.decode(turn).endswith(end) else turn[-1:])]
    assert tokenizer.decode(reply_tokens(chat, ended, results, TOOLS)) == after, "a string ended it"


def test_a_turn_whose_end_is_not_found_before_others_is_an_error() -> None:
    kind, end = NAMED["Apriel-1.5"], "{{ '\n<|end|>\n' if not loop.last or not m.tool_calls }}{% endfor %}"
    template = kind.template.replace("]</tool_calls>", "{{ ')stop' if last else ']</tool_calls>' }}")
    template = template.replace("{{ '\n' }}<|end|>\n{% endfor %}", end)
    chat = chat_of(tokenizer_of(replace(kind, template=template)))
    with pytest.raises(ValueError, match=r"it ends a turn with .*stop.* where no end was found"):
        reply_text(chat, RESULTS[:1], TOOLS)


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
    kind, turns = NAMED[name], CALLING if called else messages_of(TEXTS["one"])
    row = encoded(kind, turns, TOOLS)
    assert row.tokens.tolist() == learned_truth(kind, turns, TOOLS) and learned_in(kind, row) == [learned]


@pytest.mark.parametrize("thinking", ["", "so"])
def test_a_turn_starts_after_its_opening_though_thoughts_before_it_are_left_out(thinking: str) -> None:
    """gpt-oss writes thoughts before a call until an answer follows, and those of the last turn."""
    kind, call = NAMED["gpt-oss"], "<|start|>assistant to="
    thought = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if m.thinking and CASE }}"
    no_answer = "(messages | selectattr('role', 'equalto', 'assistant') | list | last).tool_calls"
    template = kind.template.replace(call, thought.replace("CASE", no_answer) + call)
    final = "<|start|>assistant<|channel|>final"
    kind = replace(kind, template=template.replace(final, thought.replace("CASE", "loop.last") + final))
    answer = {"role": "assistant", "content": "and it"} | ({"thinking": thinking} if thinking else {})
    turns = [QUESTION, {**CALLING[1], "thinking": "it"}, RESULTS[0], answer]
    row = encoded(kind, turns, TOOLS, "last")
    assert row.tokens.tolist() == truth(kind, turns, TOOLS)
    thoughts = "<|channel|>analysis<|message|>so<|end|><|start|>assistant" if thinking else ""
    assert learned_in(kind, row) == [f"{thoughts}<|channel|>final<|message|>and it<|return|>"]


@pytest.mark.parametrize(("name", "content"), [("R1-Distill-Qwen", None), ("QwQ", "")])
def test_a_call_has_a_content_that_the_template_takes_everywhere(name: str, content: str | None) -> None:
    kind = NAMED[name]
    for call in ({"content": None}, {}, {"content": ""}):
        turn = {"role": "assistant", "tool_calls": CALLS[:1], **call}
        turns = [QUESTION, turn, RESULTS[0], {"role": "assistant", "content": "and"}]
        row = encoded(kind, turns, TOOLS)
        assert row.tokens.tolist() == truth(kind, [QUESTION, {**turn, "content": content}, *turns[2:]], TOOLS)
        assert all(is_end(kind, part[-1]) and not any(is_end(kind, token) for token in part[:-1]) for part in parts(row))
        assert len(parts(row)) == 2


@pytest.mark.parametrize(("name", "end"), [("Apriel-1.6", "\n<|end|>"), ("Apertus", "<|assistant_end|>")])
def test_turns_before_others_have_the_end_that_only_these_have(name: str, end: str) -> None:
    kind, messages = NAMED[name], messages_of(TEXTS["one"] * 2)
    tokenizer, chat = tokenizer_of(kind), chat_of(tokenizer_of(kind))
    row = encoded(kind, messages)
    assert learned_in(kind, row) == [f"and it{end}", f"and it{end.strip()}"]
    assert row.tokens.tolist() == learned_truth(kind, messages) and chat.end.text == end
    after = tokenizer.decode(truth(kind, messages[:3], opened=True)).partition("and it")[2]
    for turn, rest in ((parts(row)[0], after.removeprefix(end)), (parts(row)[1], after.removeprefix(end)), ([5], after)):
        assert tokenizer.decode(reply_tokens(chat, turn, messages[2:3])) == rest


@kinds
def test_a_saved_model_has_the_same_tokenizer_template_and_stops(kind: Kind, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    ends = tokenizer.convert_ids_to_tokens(list(chat_of(tokenizer).end.tokens))
    assert set(ends) == kind.stops or (kind.name == "GLM-4.5" and set(ends) <= kind.stops)
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
    tokenizer = with_template({"default": CHATML, "tool_use": "tools " + CHATML})
    tokenizer.save_pretrained(tmp_path / "model")
    policy = PolicyConfig(model_name=str(tmp_path / "model"), tokenizer=TokenizerConfig(chat_template=own))
    (tmp_path / "final_model").mkdir()
    save_tokenizer(policy, load_tokenizer(policy), tmp_path / "final_model")
    again = AutoTokenizer.from_pretrained(tmp_path / "final_model")
    assert again.chat_template == load_tokenizer(policy).chat_template == (own or tokenizer.chat_template)


LETTERS = st.sampled_from([*"he lo\n5=| \té日😀", "\u0301", "\u200f", "\x00"])
TEXT = st.text(LETTERS, min_size=1, max_size=12).filter(str.strip)


@kinds
@settings(max_examples=8, deadline=None, derandomize=True)
@given(texts=st.lists(TEXT, min_size=2, max_size=4).filter(lambda texts: len(texts) % 2 == 0))
@example(texts=TEXTS["several"])
@example(texts=TEXTS["spaces"])
@example(texts=TEXTS["unicode"])
@example(texts=TEXTS["long"])
def test_any_text(kind: Kind, texts: list[str]) -> None:
    if kind.name == "an end of plain text":
        texts = [text.replace("|", "l") for text in texts]
    messages, tokenizer = messages_of(texts), tokenizer_of(kind)
    row = encoded(kind, messages, turns="all" if kind.again else "last")
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
        whole = tokenizer(prompt + response)["input_ids"]
        whole = whole if whole[-1] == tokenizer.eos_token_id else [*whole, tokenizer.eos_token_id]
        if whole[: len(asked)] == asked.tokens.tolist():
            assert plain.tokens.tolist() == whole


def test_a_long_text_is_tokenized_only_until_it_exceeds_the_room() -> None:
    tokenizer, room = character_tokenizer("0123456789"), 6
    for text in ("", "12", "123456", "1" * 30, "1" * 10_000):
        tokens = text_tokens(chat_of(tokenizer), [4], text, room)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokens == whole if len(whole) <= room else room < len(tokens) <= 50
    dropping = character_tokenizer("0123456789")  # most characters
    dropping.backend_tokenizer.normalizer = Replace(" ", "")
    assert text_tokens(chat_of(dropping), [4], " " * 10_000 + "12", 6) == [5, 6]


@kinds
def test_copies_of_tokenizers_share_nothing_but_the_model(kind: Kind) -> None:
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(5, stride=1, direction="left")
    backend.enable_padding(length=7, pad_id=1, direction="left")
    backend.encode_special_tokens = True
    before = backend.to_str()
    with copies_share_models():
        copied = copy.deepcopy(backend)
    known = {pickle.dumps(backend.model): backend.model}
    sent = [unpacked(packed(copy.deepcopy, tokenizer), models).backend_tokenizer for models in ({}, known)]
    assert copied.encode_special_tokens
    for made in (copied, *sent):
        assert made.to_str() == before
        made.no_truncation()
        made.normalizer = Replace(" ", "")
        made.add_tokens(["<new>"])
    assert backend.to_str() == copy.deepcopy(backend).to_str() == before


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
        turns = "all" if kind.again else "last"
        ours, theirs = (encoded(tokenizer, messages_of(TEXTS[texts]), turns=turns) for tokenizer in (fast, slow))
        assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.loss_mask.tolist() == theirs.loss_mask.tolist()
    chats, turn = (chat_of(fast), chat_of(slow)), sampled(kind, asked, "and it")[:-1]
    assert chats[0].end == chats[1].end
    assert reply_tokens(chats[0], turn, reply) == reply_tokens(chats[1], turn, reply)


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
    template = f"{{% for m in messages %}}<{{{{ m.role[0] }}}}>{{{{ m.content }}}}{end}{rest[:1]}{{% endfor %}}{rest[1:]}"
    tokenizer = character_tokenizer("0123456789<>[]|ua\n", template)
    assert learned_in(tokenizer, encoded(tokenizer, messages_of(["1", "5"])))[0].endswith(loss)
    assert tokenizer.convert_ids_to_tokens(list(chat_of(tokenizer).end.tokens)) == ([end] if len(end) == 1 else [])
    assert chat_of(tokenizer).end.text == end


def test_a_turn_ends_at_the_eos_token() -> None:
    """Generation never passes it, although this template opens each question before it is asked."""
    body = "{{ m.content }}{{ '<a>' if m.role == 'user' else eos_token + '\n<u>' }}"
    tokenizer = character_tokenizer("0123456789<>ua\n", f"<u>{{% for m in messages %}}{body}{{% endfor %}}")
    assert learned_in(tokenizer, encoded(tokenizer, messages_of(["1", "5", "2", "6"]))) == ["5<eos>", "6<eos>"]
    assert chat_of(tokenizer).end.text == "<eos>" and reply_text(chat_of(tokenizer), messages_of(["3"])) == "\n<u>3<a>"


@pytest.mark.parametrize("kind", CALLING_KINDS, ids=lambda kind: kind.name)
def test_results_of_several_calls_follow_a_turn(kind: Kind) -> None:
    """Also with templates that take one call of a turn: the policy made them."""
    text = reply_text(chat_of(tokenizer_of(kind)), RESULTS)
    assert [text.count(result["content"]) for result in RESULTS] == [1, 1]


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
    plain = re.sub("{% (end)?generation %}", "", kind.template)
    templates = plain, f"{{% generation %}}{plain}{{% endgeneration %}}"
    rows = [encoded(with_template(template, kind), messages_of(TEXTS["several"])) for template in templates]
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist() and rows[0].loss_mask.tolist() == rows[1].loss_mask.tolist()


@pytest.mark.parametrize("texts", [["a", "", "hello", ""], ["a", "and", "hello", ""]])
@pytest.mark.parametrize("thought", ["", "{% generation %}{{ m.reasoning_content }}{% endgeneration %}"])
def test_empty_turns_with_marks_around_the_text_teach_the_end(texts: list[str], thought: str) -> None:
    before = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + thought
    after = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = with_template(before + "{% generation %}{{ m.content }}{% endgeneration %}" + after)
    learned = [text + "<|im_end|>" for text in texts[1::2]]
    assert learned_in(tokenizer, encoded(tokenizer, messages_of(texts))) == learned


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
    kind = NAMED[name]
    before, loop, rest = kind.template.rpartition("{% for m in messages %}")
    body, end, prompt = rest.partition("{% endfor %}{% if add_generation_prompt %}")
    marked = f"{{% if m.role == 'assistant' %}}{{% generation %}}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}"
    template = before + loop + marked + end + prompt.replace("assistant\n", f"assistant\n{opening}")
    row = encoded(with_template(template, kind), messages_of(["hello", "the hello", "a", "and"]))
    assert learned_in(kind, row) == learned


@pytest.mark.parametrize("thought", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("weight", [0, 1])
def test_a_turn_of_which_the_template_leaves_nothing_takes_no_marks_of_the_next(weight: int, thought: str) -> None:
    text = "{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% endgeneration %}"
    body = f"{{% if m.role == 'assistant' %}}{thought}{text}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    loop = f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{body}<|im_end|>\n{{% endfor %}}"
    tokenizer = with_template(loop + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    messages = messages_of(["hello", "<think>the</think>", "a", "<think>the</think>and", "it", "the hello"])
    messages[3]["weight"] = weight
    learned = ["<|im_end|>", *["and<|im_end|>"] * weight, "the hello<|im_end|>"]
    assert learned_in(tokenizer, encoded(tokenizer, messages)) == learned


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
    text = tokenizer.decode([*turn, *reply_tokens(chat, turn, messages[2:])])
    rest = whole.removeprefix(prompt)
    also = rest.replace("<<", "<") if sampled == "and <" else rest  # as much may be the start of the end, and is
    assert squeezed(text) in (squeezed(rest), squeezed(also))
    assert chat.turn_text(turn).strip() == (sampled if sampled.endswith(("<", "_")) else "and")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.tools], ids=lambda kind: kind.name)
@pytest.mark.parametrize("what", ["call", "result"])
def test_what_a_template_leaves_out_is_an_error(kind: Kind, what: str) -> None:
    asked, answer = messages_of(["hello", "and it"])
    try:
        row = encoded(kind, CALLING if what == "call" else [asked, answer, RESULTS[0], answer], turns="last")
        assert what == "result" and RESULTS[0]["content"] in tokenizer_of(kind).decode(row.tokens)
    except DataError as error:
        assert "the chat template rejects the conversation" in str(error)
        assert len(encoded(kind, [asked, answer], turns="last")) > 0


def test_calls_that_a_template_leaves_out_are_an_error() -> None:
    for name, content, calls, lost in (
        ("gpt-oss", None, CALLS, "all calls of a turn but one"),
        ("R1-Distill", "hello", CALLS[:1], "tool calls of a turn with a text"),
    ):
        messages = [QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}]
        with pytest.raises(DataError, match=f"row 1: the chat template rejects the conversation: it leaves out {lost}"):
            encoded(NAMED[name], messages)


ONE_SYSTEM = (
    "{%% set systems = messages | selectattr('role', 'equalto', 'system') | list %%}{{ (systems | %s).content if systems }}"
    "{%% for m in messages if m.role != 'system' %%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


@pytest.mark.parametrize("written", ["first", "last"])
def test_system_messages_that_a_template_leaves_out_are_an_error(written: str) -> None:
    """gpt-oss writes the first one alone, R1 the last."""
    tokenizer, turns = with_template(ONE_SYSTEM % written), messages_of(["hello", "5"])
    one, other = ({"role": "system", "content": text} for text in ("be kind", "be brief"))
    for messages in ([one, other, *turns], [one, *turns, other, *turns]):
        with pytest.raises(DataError, match="it leaves out a system message besides another one"):
            encoded(tokenizer, messages)
    assert "be kind" in tokenizer.decode(encoded(tokenizer, [one, *turns]).tokens)


@kinds
def test_no_calls_are_none(kind: Kind) -> None:
    asked, answer = messages_of(["hello", "5"])
    rows = [encoded(kind, [asked, answer | more]) for more in ({}, {"tool_calls": []})]
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist()


def test_a_tokenizer_may_have_a_template_for_tools() -> None:
    """As Command R's and Hermes'. The other one knows no calls."""
    tokenizer = with_template({"default": CHATML.replace("m.tool_calls or []", "[]"), "tool_use": CHATML})
    shown_calls = [QUESTION, {**CALLING[1], "content": ""}]
    assert encoded(tokenizer, CALLING, TOOLS).tokens.tolist() == truth(KINDS[0], shown_calls, TOOLS)
    with pytest.raises(DataError, match="it leaves out tool calls"):
        encoded(tokenizer, CALLING)


def test_an_end_of_calls_is_not_written_twice() -> None:
    kind = NAMED["gpt-oss"]
    kind = replace(kind, template=kind.template.replace("<|call|>", "<|call|>\n"))
    assert encoded(kind, CALLING, TOOLS).tokens.tolist() == truth(kind, CALLING, TOOLS)


def test_rows_that_teach_nothing_are_known() -> None:
    """Nemotron Nano v2 leaves out an empty answer at the end."""
    kind = NAMED["Qwen2.5"]
    shown_turns = "{% for m in messages if m.content or m.role != 'assistant' %}"
    kind = replace(kind, template=kind.template.replace("{% for m in messages %}", shown_turns))
    row = encoded(kind, messages_of(["hello", ""]))
    assert not row.loss_mask.any() and "empty" in row.differences


def test_lost_texts_of_learned_turns_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    question, answer = messages_of(["hello", "and it"])
    examples = [example_of([question, {**answer, "reasoning_content": thought}]) for thought in ("hm", None, "hm hm")]
    tokenization.warn_of_differences(encode_demonstrations(examples, tokenizer_of(KINDS[1])))
    assert not caplog.text, "Qwen3 writes the thought of the last turn"
    tokenization.warn_of_differences(encode_demonstrations(examples, tokenizer_of(KINDS[0])))
    assert "row 1 and 1 other conversations: the chat template leaves out texts of turns that are learned" in caplog.text
    differences = encoded(KINDS[1], [question, {**answer, "reasoning": "hm"}]).differences
    assert "left out" in differences, "Qwen3's template knows the thought by another name"


def test_a_system_prompt_may_move() -> None:
    """Mistral's is a part of the last question: of a prompt, but of no finished conversation."""
    system = "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    template = system + MISTRAL1.replace("'[INST] ' +", "'[INST] ' + (system if loop.last else '') +")
    kind = replace(NAMED["Mistral v1"], template=template)
    messages = [{"role": "system", "content": "be it"}, *messages_of(["hello", "and it"])]
    (prompt,), row = encode_prompts([example_of(messages)], tokenizer_of(kind)), encoded(kind, messages)
    assert prompt.tokens.tolist() == truth(kind, messages[:2], opened=True) and "be it" in prompt.text
    assert row.tokens.tolist() == truth(kind, messages) and learned_in(kind, row)[0].strip() == "and it</s>"


@pytest.mark.parametrize(("arguments", "same"), [("", {}), (None, {}), ("{}", {}), ({}, {}), ('"x"', '"x"')])
def test_arguments_may_be_missing_or_a_text(arguments: Any, same: Any) -> None:
    """As vLLM reads them. The truth is the template's text of an empty object, and of a text, which is JSON already."""
    calls = [[{**CALLS[0], "function": {"name": "f", "arguments": value}}] for value in (arguments, same)]
    given, plain = ([QUESTION, {"role": "assistant", "content": "", "tool_calls": call}] for call in calls)
    assert encoded(KINDS[0], given, TOOLS, "last").tokens.tolist() == truth(KINDS[0], plain, TOOLS)


DATE = {"date_string": "1 May", "hello": None}


@pytest.mark.parametrize(
    ("name", "variables"), [("Qwen3", {"enable_thinking": False}), ("Llama 3.1, dated", DATE), ("marked", {"x": "h"})]
)
def test_rows_have_variables_of_the_template(name: str, variables: dict[str, Any]) -> None:
    """As TRL's: of a row of SFT, a preference and a prompt, and where an environment replies to it."""
    kind = NAMED[name.replace("marked", "Qwen2.5")]
    tokenizer = copy.copy(tokenizer_of(kind))
    if kind.name != "Llama 3.1, dated":
        opening, thought = "{% if add_generation_prompt %}<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
        thought = f"{{% if enable_thinking is false %}}{thought}{{% endif %}}"
        tokenizer.chat_template = kind.template.replace(opening, opening + thought)
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
    assert tokenization.with_opening(prompt, messages[:1], tokenizer).tokens.tolist() == opened
    pair = {"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:], "chat_template_kwargs": variables}
    (both,) = tokenization.encode_preferences([preference_of(pair, "row 1", DataConfig(path="x"))], tokenizer)
    assert both.chosen.tokens.tolist() == both.rejected.tokens.tolist() == whole


def test_a_template_may_write_none() -> None:
    """It is found out how it takes calls, although its own text looks like a content or a list of Python."""
    kind = NAMED["R1-Distill"]
    chat = chat_of(with_template("Effort: None {'a': 1}\n" + kind.template, kind))
    assert 'f\n{"a": "x"}<|tool_call_end|>' in chat.render(CALLING, opened=False)


def test_contents_are_parts_if_the_template_takes_no_texts() -> None:
    """As SmolVLM's and LLaVA's."""
    template = KINDS[0].template.replace("m.content or ''", "m.content[0].text if m.content is not string else ''")
    kind, messages = replace(KINDS[0], name="parts", template=template), messages_of(TEXTS["several"])
    given = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert encoded(kind, messages).tokens.tolist() == truth(kind, given) == truth(KINDS[0], messages)


def test_edges_without_offsets_take_one_pass() -> None:
    """Kimi's tokenizer has none. The work of it is linear in the text: neither a prefix nor the text is tokenized again."""
    seen: list[int] = []

    class Counted(WithoutOffsets):
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return super().__call__(text, **options)

    tokenizer = tokenizer_of(NAMED["Kimi"])
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
    ends = [number for number, turn in enumerate(turns, start=1) if turn["role"] == "assistant"]
    return turns if draw(st.booleans()) or len(turns) == 2 or not kind.tools else turns[: ends[-2]]


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
    (prompt,) = encode_prompts([example_of(messages_of("aa"))], tokenizer)
    renderer, agent = Renderer(tokenizer, "hermes"), Conversations()
    context = renderer.context(ChatBody(model="policy", messages=[asked]), agent)
    opened = tokenization.with_opening(prompt, [asked], tokenizer)
    assert context.whole() == truth(kind, [asked], opened=True) == opened.tokens.tolist()
    turn = sampled(kind, [asked], "and it")
    said = {"role": "assistant", "content": renderer.text(turn)}
    agent.add(Answer(context, finished(turn), message_key(said), trained=True))
    in_parts = {**more, "content": [{"type": "text", "text": more["content"]}]}
    again = [asked, {**said, "refusal": None, "tool_calls": None}, in_parts]
    following = renderer.context(ChatBody(model="policy", messages=again), agent)
    assert following.after is agent.answers[0]
    assert list(following.tokens) == reply_tokens(chat, turn, [more])
