"""Answers in OpenAI's format.

    answer = ChatFormat(body, token_text, prompt).whole(result, text, calls)
    chunks_of(answer, usage=False)                       # as a stream

Every answer and every chunk has `policy_versions`: the versions of the policy that made its tokens, in ascending order.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.rl.agents.protocol import MODEL, ChatBody
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.tools import Call

Calls = Sequence[tuple[str, Call]]
"""Tool calls, each with its id."""


@dataclass(frozen=True)
class ChatFormat:
    """Formats the answer to one request.

    `token_text` decodes one token; `prompt` are the tokens of the request's whole context.
    """

    body: ChatBody
    token_text: Callable[[int], str]
    prompt: Sequence[int]

    def whole(self, result: FinishedRequest, text: str, calls: Calls) -> dict[str, Any]:
        """Returns the whole answer. `result` has all tokens, `text` what they say besides `calls`."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(*call) for call in calls]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else result.finish_reason}
        prompt, completion = len(self.prompt), len(result.tokens)
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "policy_versions": sorted(set(result.versions)),
            "choices": [{**choice, **self._tokens(result)}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
            **({"prompt_token_ids": list(self.prompt)} if self.body.return_token_ids else {}),
        }

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


def chunks_of(answer: dict[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """Returns the chunks of a whole answer: one with everything, and with `usage` one without choices, for the counts of
    tokens. A client that did not ask for it reads `choices[0]` of every chunk."""
    (choice,) = answer["choices"]
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {**answer, "object": "chat.completion.chunk"}
    counts = {**head, "choices": [], "usage": head.pop("usage")}
    return [{**head, "choices": [{**choice, "delta": delta}]}, *([counts] if usage else [])]


def _call(identity: str, call: Call) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
