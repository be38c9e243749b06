"""OpenAI's messages as a chat template takes them: contents, arguments of tool calls, and what the template leaves out.

`MessageFormat` finds out by rendering short conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagrl.config import Json

Messages = Sequence[Mapping[str, Any]]

QUESTION, ANSWER = "Which is it?", "it-is-so"  # texts of the conversations with which a template is looked at

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages under which templates expect thoughts; each knows some."""

CALL_ID = "000000000"  # templates of Mistral take ids of nine letters or digits only

RESULT: Mapping[str, str] = {"role": "tool", "name": "f", "tool_call_id": CALL_ID, "content": QUESTION}
"""The result of a call in those conversations."""

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]},
    },
}
"""The function that those conversations call."""


@dataclass(frozen=True)
class _CallStyle:
    """How the template wants turns with tool calls: the content of one without, and whether arguments stay JSON text."""

    content: Mapping[str, str | None]
    as_text: bool


_STYLES = [_CallStyle(content, as_text) for as_text in (False, True) for content in ({"content": None}, {}, {"content": ""})]
"""OpenAI's own content first: null."""


class MessageFormat:
    """How a template takes messages."""

    def __init__(self, renders: Sequence[Callable[[Messages], str]]) -> None:
        """`renders` render a conversation, and raise what the template raises. The first that takes it counts."""
        self._renders = renders
        self._written_calls: dict[tuple[int, bool], bool] = {}
        self._written_systems: dict[str, bool] = {}

    def turns(self, messages: Messages) -> list[dict[str, Any]]:
        """Converts messages. Raises ValueError for those that the template would leave out."""
        turns = self._identified([self._turn(message) for message in messages])
        lost = next((lost for turn in turns if (lost := self._lost(turn))), "")
        if not lost and not self._writes_systems(turns):
            lost = "a system message besides another one, or after other turns"
        if lost:
            raise ValueError(f"it leaves out {lost}; use one that writes them (policy.tokenizer.chat_template)")
        return turns

    def shown(self, messages: Messages) -> str:
        """Returns the text of a conversation; empty if the template rejects it."""
        return self._shown([*map(self._turn, messages)])

    def takes_id(self, identity: str) -> bool:
        """Returns whether the template takes a call with this id, and its result."""
        return bool(self.shown([*exchange([("f", identity)]), {**RESULT, "tool_call_id": identity}]))

    @cached_property
    def _rejects_ids(self) -> bool:
        return self.takes_id(CALL_ID) and not self.takes_id("call_0")

    def _identified(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns turns whose calls and results have other ids where the template rejects theirs, as Mistral's do."""
        if not self._rejects_ids:
            return turns
        ids, own, results = list[str](), list[Any](), count()
        for turn in turns:
            for call in turn.get("tool_calls", ()):
                one = call.get("id")
                free = isinstance(one, str) and (one in own or one not in ids)
                call["id"] = one if free and self.takes_id(one) else next_id(ids)
                own, ids = [*own, one], [*ids, call["id"]]
            if turn["role"] == "tool":
                place, asked = next(results), turn.get("tool_call_id")  # without ids, results are in the order of calls
                place = len(own) - 1 - own[::-1].index(asked) if asked is not None and asked in own else place
                if place < len(ids):
                    turn["tool_call_id"] = ids[place]
                elif not isinstance(asked, str) or not self.takes_id(asked):
                    turn["tool_call_id"] = f"{place:09}"  # of a call that is not in the conversation
        return turns

    def _lost(self, turn: Mapping[str, Any]) -> str:
        calls = turn.get("tool_calls")
        if turn["role"] in self._left_out:
            return f"messages of the role {turn['role']!r}"
        if not calls or self._writes_calls(min(len(calls), 2), said=bool(turn.get("content"))):
            return ""
        if not self._writes_calls(1, said=False):
            return "tool calls"
        several = len(calls) > 1 and not self._writes_calls(2, said=False)
        return "all calls of a turn but one" if several else "tool calls of a turn with a text"

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = {name: value for name, value in message.items() if value is not None and name != "refusal"}
        if turn.get("tool_calls") == []:  # some templates write that
            del turn["tool_calls"]
        turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
        turn |= {} if (content := content_of(message)) is None else {"content": content}
        if calls := turn.get("tool_calls"):
            style = self._call_style or _STYLES[0]
            content = {} if turn.get("content") else style.content
            turn = {name: value for name, value in turn.items() if name != "content" or value}
            turn |= {**content, "tool_calls": [_styled(call, as_text=style.as_text) for call in calls]}
        if self._takes_parts and isinstance(turn.get("content"), str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        return turn

    def _shown(self, turns: Messages) -> str:
        for render in self._renders:
            with suppress(Exception):  # Jinja's errors, and those that templates raise
                return render(turns)
        return ""

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes contents that are lists of parts, as OpenAI's may be, and leaves out plain texts."""
        texts = (QUESTION, [{"type": "text", "text": QUESTION}])
        plain, parts = (QUESTION in self._shown([{"role": "user", "content": content}]) for content in texts)
        return parts and not plain

    @cached_property
    def _left_out(self) -> frozenset[str]:
        """The roles of messages that the template leaves out. It may reject others, and says so itself."""
        content = f"{QUESTION} {ANSWER}"
        system, result = (
            {"role": role, "content": content, "name": "f", "tool_call_id": CALL_ID} for role in ("system", "tool")
        )
        prompts = {
            "system": [[system, {"role": "user", "content": QUESTION}]],  # that of Mistral is a part of the last question
            "tool": [[*exchange(calls), result] for calls in ([("f", None)], [])],
        }
        texts = {role: [*map(self.shown, tried)] for role, tried in prompts.items()}
        return frozenset(role for role in texts if any(texts[role]) and not any(content in text for text in texts[role]))

    def _writes_systems(self, turns: Messages) -> bool:
        """Returns whether the template writes all system messages where these turns have them. It may reject them."""
        places = re.sub("-+", "-", "".join("s" if turn["role"] == "system" else "-" for turn in turns))
        if "s" not in places[1:]:
            return True  # of the first message, `_left_out` knows
        if places not in self._written_systems:
            texts = {place: f"{QUESTION} {ANSWER} {place}" for place, kind in enumerate(places) if kind == "s"}
            tried = [
                [{"role": "system", "content": texts[place]}] if place in texts else exchange([])
                for place in range(len(places))
            ]
            text = self.shown([turn for part in tried for turn in part][: None if places.endswith("s") else -1])
            self._written_systems[places] = not text or all(one in text for one in texts.values())
        return self._written_systems[places]

    def _writes_calls(self, count: int, *, said: bool) -> bool:
        """Returns whether the template writes all of a turn's calls, with a text or without. It may reject such turns."""
        if (count, said) not in self._written_calls:
            question, answer = exchange([("f", None)] * count)
            text = self.shown([question, answer | ({"content": QUESTION} if said else {})])
            rejects = not text and (count > 1 or said or not any(self._shown(self._called(style)) for style in _STYLES))
            self._written_calls[count, said] = rejects or (self._call_style is not None and text.count(ANSWER) >= count)
        return self._written_calls[count, said]

    def _called(self, style: _CallStyle) -> list[dict[str, Any]]:
        """Returns a question and a call in a style."""
        question, answer = exchange([("f", None)])
        calls = [_styled(call, as_text=style.as_text) for call in answer["tool_calls"]]
        return [self._turn(question), {"role": "assistant", **style.content, "tool_calls": calls}]

    @cached_property
    def _call_style(self) -> _CallStyle | None:
        """The style in which the template writes a call, and not as Python shows it; None if it writes none.

        It is one that the template also takes before a result, and after one without another text of that (Apertus), if
        there is any.
        """
        found = []
        for place, style in enumerate(_STYLES):
            turns = self._called(style)
            text, followed = self._shown(turns), self._shown([*turns, self._turn(RESULT)])
            again = self._shown([*turns, self._turn(RESULT), turns[1]])
            if ANSWER in text:
                rewritten = not again.startswith(followed)
                found.append((not followed, rewritten, text.count("None") + text.count("{'"), place))
        return _STYLES[min(found)[-1]] if found else None


def next_id(ids: Sequence[str]) -> str:
    """Returns an id for the next call of a conversation whose calls have `ids`: their number, with nine digits."""
    return next(number for place in count(len(ids)) if (number := f"{place:09}") not in ids)


def answer(calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a turn of the assistant: a text, or calls of functions by name and id, each of which has the text."""
    made = [
        {"id": identity or CALL_ID, "type": "function", "function": {"name": name, "arguments": {"a": ANSWER}}}
        for name, identity in calls
    ]
    return {"role": "assistant"} | ({"tool_calls": made} if made else {"content": ANSWER})


def exchange(calls: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Returns a question and its answer (`answer`)."""
    return [{"role": "user", "content": QUESTION}, answer(calls)]


def with_answers(before: Messages, after: Messages, most: int, *, called: bool = False) -> Messages:
    """Returns the conversation `before`, which `after` follows, with an `answer` in place of each turn of the assistant.

    These call the functions whose results follow, but at most `most` in a turn. `called`: the last turn calls one at least.
    """
    turns, whole = list[Mapping[str, Any]](), [*before, *after]
    for place, turn in enumerate(before, start=1):
        if turn["role"] == "assistant":
            names = {call.get("id"): call.get("function", {}).get("name") for call in turn.get("tool_calls") or ()}
            results = [*takewhile(lambda other: other["role"] == "tool", islice(whole, place, None))]
            calls = [(result.get("name"), result.get("tool_call_id")) for result in results]
            calls = calls or [(None, None)] * (called and place == len(before))
            turn = answer([(str(name or names.get(identity) or "f"), identity) for name, identity in calls[:most]])
        turns.append(turn)
    return turns


def content_of(message: Mapping[str, Any]) -> Any:
    """Returns the content of OpenAI's message: text parts as one text, and a refusal in place of none."""
    content = message.get("content")
    if isinstance(content, list):
        texts: list[Any] = [
            part.get(part["type"]) if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
            for part in content
        ]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else content
    return content or message.get("refusal") or content


def with_parsed_arguments(call: Any) -> Any:
    """Returns a tool call with its arguments parsed, if they are JSON text as in OpenAI's format."""
    return _styled(call, as_text=False)


def _styled(call: Any, *, as_text: bool) -> Any:
    """Returns a tool call with arguments as an object, or as JSON text in one spelling. Text that is no JSON stays."""
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _styled(call["function"], as_text=as_text)}
    arguments = call.get("arguments") or {}  # of a function without any, OpenAI's may be an empty text
    with suppress(ValueError):  # the policy's own call
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = arguments if isinstance(parsed, str) else parsed
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": arguments}
