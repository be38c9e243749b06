"""Answers in OpenAI's format, whole or in chunks.

    shape = ChatShape(body, texts)
    shape.whole(answer)                          # the JSON of an answer
    shape.chunk(made, "text")                    # a chunk of a streamed one

Every answer and every chunk has `policy_versions`: the versions of the policy that made its tokens, in ascending order.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagrl.rl.agents.protocol import MODEL, ChatBody, CompletionBody, SamplingBody
from dagrl.rl.generation import FinishedRequest

Made = FinishedRequest
TokenText = Callable[[int], str]
"""The text of a token."""

Calls = Sequence[tuple[str, str]]
"""Tool calls: the name and the JSON arguments of each."""


def versions_of(made: Made) -> list[int]:
    """Returns the policy versions that made the tokens, in ascending order."""
    return sorted(set(made.versions))


@dataclass(frozen=True)
class Shape:
    """What a request asks of its answer's form. `prompt` are the tokens of its whole context."""

    body: SamplingBody
    token_text: TokenText
    prompt: Sequence[int]
    identity: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    kind = chunk_kind = prefix = ""

    def whole(self, made: Made, text: str, calls: Calls = ()) -> dict[str, Any]:
        """Returns the whole answer. `made` are all tokens and `text` what they say besides `calls`."""
        choice = {"index": 0, **self._said(text, calls), "finish_reason": "tool_calls" if calls else made.finish_reason}
        return {
            **self._head(self.kind, made),
            "choices": [{**choice, **self._tokens(made)}],
            "usage": self._usage(len(made.tokens)),
            **({"prompt_token_ids": list(self.prompt)} if self.body.return_token_ids else {}),
        }

    def first(self) -> dict[str, Any] | None:
        """Returns the chunk that opens a streamed answer, if there is one."""
        return None

    def chunk(self, made: Made, text: str, calls: Calls = (), reason: str | None = None) -> dict[str, Any]:
        """Returns a chunk of new tokens and new text; the last has the `reason` of the end."""
        choice = {"index": 0, **self._delta(text, calls), "finish_reason": "tool_calls" if calls and reason else reason}
        return {**self._head(self.chunk_kind, made), "choices": [{**choice, **self._tokens(made)}]}

    def usage(self, made: Made) -> dict[str, Any] | None:
        """Returns the chunk after the last, if the request asks for it. `made` are all tokens."""
        if not self.body.stream_options.include_usage:
            return None
        return {**self._head(self.chunk_kind, made), "choices": [], "usage": self._usage(len(made.tokens))}

    def _head(self, kind: str, made: Made) -> dict[str, Any]:
        head = {"id": f"{self.prefix}-{self.identity}", "object": kind, "created": self.created, "model": MODEL}
        return {**head, "policy_versions": versions_of(made)}

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _tokens(self, made: Made) -> dict[str, Any]:
        ids = {"token_ids": list(made.tokens)} if self.body.return_token_ids else {}
        return {"logprobs": self._logprobs(made) if self.body.wants_logprobs else None, **ids}

    def _said(self, text: str, calls: Calls) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str, calls: Calls) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, made: Made) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class ChatShape(Shape):
    """The form of `chat.completion`."""

    body: ChatBody

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self) -> dict[str, Any]:
        head = self._head(self.chunk_kind, FinishedRequest(0, (), (), (), ""))
        return {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}

    def _said(self, text: str, calls: Calls) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(*call) for call in calls]}
        return {"message": message}

    def _delta(self, text: str, calls: Calls) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": index, **_call(*call)} for index, call in enumerate(calls)]
        return {"delta": delta}

    def _logprobs(self, made: Made) -> dict[str, Any]:
        pairs = zip(made.tokens, made.logprobs, strict=True)
        return {"content": [self._logprob(token, float(logprob)) for token, logprob in pairs], "refusal": None}

    def _logprob(self, token: int, logprob: float) -> Mapping[str, Any]:
        text = self.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


@dataclass(frozen=True)
class CompletionShape(Shape):
    """The form of `text_completion`."""

    body: CompletionBody

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _said(self, text: str, calls: Calls) -> dict[str, Any]:
        return {"text": text}

    _delta = _said

    def _logprobs(self, made: Made) -> dict[str, Any]:
        texts = [self.token_text(token) for token in made.tokens]
        offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [float(logprob) for logprob in made.logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
