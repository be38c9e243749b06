"""Answers in OpenAI's format, whole or in chunks.

    answer = ChatFormat(body, token_text, prompt)
    answer.whole(result, text, calls)                    # the JSON of an answer
    answer.first(), answer.last(result, text, calls)     # the chunks of a streamed one

Every answer and every chunk has `policy_versions`: the versions of the policy that made its tokens, in ascending order.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagrl.rl.agents.protocol import MODEL, ChatBody
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.tools import Call

Calls = Sequence[tuple[str, Call]]
"""Tool calls, each with its id."""


@dataclass(frozen=True)
class ChatFormat:
    """Formats the answer to one request: `chat.completion`, or chunks of it.

    `token_text` decodes one token; `prompt` are the tokens of the request's whole context.
    """

    body: ChatBody
    token_text: Callable[[int], str]
    prompt: Sequence[int]
    identity: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, result: FinishedRequest, text: str, calls: Calls) -> dict[str, Any]:
        """Returns the whole answer. `result` has all tokens, `text` what they say besides `calls`."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(*call) for call in calls]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else result.finish_reason}
        return {
            **self._head("chat.completion", result),
            "choices": [{**choice, **self._tokens(result)}],
            "usage": self._usage(len(result.tokens)),
            **({"prompt_token_ids": list(self.prompt)} if self.body.return_token_ids else {}),
        }

    def first(self) -> dict[str, Any]:
        """Returns the chunk that opens a streamed answer."""
        return self._chunk(FinishedRequest(0, (), (), (), ""), {"role": "assistant", "content": ""}, None)

    def last(self, result: FinishedRequest, text: str, calls: Calls) -> dict[str, Any]:
        """Returns the chunk with everything that `whole` has."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": index, **_call(*call)} for index, call in enumerate(calls)]
        chunk = self._chunk(result, delta, "tool_calls" if calls else result.finish_reason)
        chunk["choices"][0] |= self._tokens(result)
        return chunk

    def usage(self, result: FinishedRequest) -> dict[str, Any]:
        """Returns the chunk of token counts that ends a stream."""
        return {**self._head("chat.completion.chunk", result), "choices": [], "usage": self._usage(len(result.tokens))}

    def _chunk(self, result: FinishedRequest, delta: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {**self._head("chat.completion.chunk", result), "choices": [choice]}

    def _head(self, kind: str, result: FinishedRequest) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self.identity}", "object": kind, "created": self.created, "model": MODEL}
        return {**head, "policy_versions": sorted(set(result.versions))}

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _tokens(self, result: FinishedRequest) -> dict[str, Any]:
        """Returns the log-probabilities and ids of the tokens that the request asks for."""
        ids = {"token_ids": list(result.tokens)} if self.body.return_token_ids else {}
        if not self.body.logprobs:
            return {"logprobs": None, **ids}
        content = []
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            text = self.token_text(token)
            content.append({"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []})
        return {"logprobs": {"content": content, "refusal": None}, **ids}


def _call(identity: str, call: Call) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
