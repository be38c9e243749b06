"""The conversations of an agent's episode, as the exact tokens that were sampled.

An answer is a node of a tree: the tokens of its context, and those that the policy sampled. A request whose messages extend
those of an earlier answer continues from that answer's tokens, and only its new messages are rendered and tokenized. A
request that extends none is the root of another conversation. `rows` makes one row of each conversation; a token that
several conversations share is in the loss of one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dagrl.data.messages import THOUGHTS
from dagrl.rl.generation import FinishedRequest

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Context:
    """The context of a request: the answer that it extends, if any, and the tokens that follow it.

    `messages` are the keys of all messages up to here (`message_key`), `given` are the request's own messages, and `text` is
    the template's text of them. `media` are the images that `tokens` stand for (`dagrl.data.media`), if any.
    """

    after: Answer | None
    tokens: Sequence[int]
    text: str
    messages: tuple[str, ...] = ()
    given: Sequence[Message] = ()
    media: Sequence[int] = ()

    def whole(self) -> list[int]:
        """Returns all tokens from the start of the conversation."""
        return [*(self.after.whole() if self.after is not None else ()), *self.tokens]

    def shown(self) -> list[int]:
        """Returns the images that all tokens stand for, from the start of the conversation."""
        before = self.after.shown() if self.after is not None else ()
        return [*before, *(self.media or [0] * len(self.tokens))]


@dataclass(eq=False)
class Answer:
    """An answer of the policy in its context.

    `key` is its key as a message of a later request. It is not `trained` on if its sampling parameters differ from the
    run's.
    """

    context: Context
    result: FinishedRequest
    key: str
    trained: bool
    followed: bool = False

    def whole(self) -> list[int]:
        """Returns all tokens of the conversation up to the end of this answer."""
        return [*self.context.whole(), *self.result.tokens]

    def shown(self) -> list[int]:
        """Returns the images that all tokens up to the end of this answer stand for."""
        return [*self.context.shown(), *[0] * len(self.result.tokens)]

    @property
    def messages(self) -> tuple[str, ...]:
        """Keys of the messages up to this answer."""
        return (*self.context.messages, self.key)

    def path(self) -> list[Answer]:
        """Returns the answers from the start of the conversation to this one."""
        before = self.context.after
        return [*(before.path() if before is not None else ()), self]


@dataclass(frozen=True)
class Row:
    """A conversation as it is trained on: the prompt's text and tokens, and the tokens that follow.

    `sampled` is True on tokens that are in the loss of this row; others have log-probability 0. `rendered` is the template's
    text of the conversation before the last answer, which has the last `answer` tokens. `shown` are the images of the
    prompt's tokens, and `media` those of `tokens`.
    """

    text: str
    prompt: Sequence[int]
    messages: Sequence[Message]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    finish_reason: str = ""
    rendered: str = ""
    answer: int = 0
    shown: Sequence[int] = ()
    media: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EpisodeRows:
    """The conversations of an episode: those trained on and the others, and how many sampled tokens are not trained on.

    In `others`, `sampled` is True on all tokens of the policy.
    """

    rows: Sequence[Row] = ()
    others: Sequence[Row] = ()
    untrained: int = 0


class Conversations:
    """The answers of one episode, in the order in which they were given. Not thread-safe."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def add(self, answer: Answer) -> None:
        """Records an answer."""
        if answer.context.after is not None:
            answer.context.after.followed = True
        self.answers.append(answer)

    def extended_by(self, messages: Sequence[str]) -> Answer | None:
        """Returns the longest answer whose messages are the first of `messages`; of equal ones, an unanswered one."""
        keys = tuple(messages)
        extended = [answer for answer in self.answers if answer.messages == keys[: len(answer.messages)]]
        # max takes the first of equals: reversed, the latest answer
        return max(reversed(extended), key=lambda answer: (len(answer.messages), not answer.followed), default=None)

    def rows(self, most: int) -> EpisodeRows:
        """Returns up to `most` conversations to train on, those with the most tokens to learn first, and the others."""
        ends = [answer for answer in self.answers if not answer.followed]
        left = {id(answer) for answer in self.answers if answer.trained}
        rows: list[Row] = []
        while ends and len(rows) < most:
            best = max(ends, key=lambda end: _learned(end, left))
            if rows and not _learned(best, left):
                break
            ends.remove(best)
            rows.append(_row(best.path(), left))
            left -= {id(answer) for answer in best.path()}
        learned = sum(sum(row.sampled) for row in rows)
        untrained = sum(len(answer.result.tokens) for answer in self.answers) - learned
        every = {id(answer) for answer in self.answers}
        return EpisodeRows(rows, [_row(end.path(), every) for end in ends], untrained)


def _learned(end: Answer, left: set[int]) -> int:
    return sum(len(answer.result.tokens) for answer in end.path() if id(answer) in left)


def _row(path: Sequence[Answer], left: set[int]) -> Row:
    """Returns the row of a path of answers. Answers that are not `left` to learn are context."""
    first, last = path[0].context, path[-1]
    whole, start = last.shown(), len(first.tokens)
    row = Row(first.text, first.tokens, first.given, shown=whole[:start], media=whole[start:])
    for answer in path:
        result, given = answer.result, () if answer is path[0] else answer.context.tokens
        row.versions.extend([row.versions[-1] if row.versions else result.versions[0]] * len(given))
        row.versions.extend(result.versions)
        row.tokens.extend([*given, *result.tokens])
        learned = id(answer) in left
        row.logprobs.extend([*[0.0] * len(given), *(result.logprobs if learned else [0.0] * len(result.tokens))])
        row.sampled.extend([*[False] * len(given), *[learned] * len(result.tokens)])
    ended = last.result.finish_reason
    return replace(row, finish_reason=ended, rendered=last.context.text, answer=len(last.result.tokens))


def message_key(message: Message) -> str:
    """Returns a key by which a message is recognized when a client sends it back: role, text, thoughts, tool calls, results.

    Clients add empty fields, strip what the policy wrote, and write a call's JSON arguments in their own way.
    """
    content, answered = message.get("content") or "", message["role"] == "assistant"
    key: dict[str, Any] = {"role": message["role"], "content": content}
    if answered and isinstance(content, str):
        key["content"] = content.strip()
    key |= {name: message[name] for name in THOUGHTS if message.get(name)}
    if calls := message.get("tool_calls"):
        key["tool_calls"] = [(call["function"]["name"], _parsed(call["function"]["arguments"] or {})) for call in calls]
    for name in ("name", "tool_call_id"):
        if not answered and message.get(name):
            key[name] = message[name]
    return json.dumps(key, sort_keys=True)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
