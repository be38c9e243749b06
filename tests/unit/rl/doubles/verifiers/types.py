"""What a client answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Said(dict[str, Any]):
    """A message of the policy, with its role as an attribute."""

    role = "assistant"


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass
class ResponseMessage:
    content: str
    tool_calls: list[ToolCall] | None
    finish_reason: str | None
    is_truncated: bool | None

    def said(self) -> Said:
        return Said(role="assistant", content=self.content)


@dataclass
class Response:
    id: str
    created: int
    model: str
    message: ResponseMessage
