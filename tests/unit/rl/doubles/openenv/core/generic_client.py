"""A double of OpenEnv's client: a server that repeats what it is told, and ends after `end`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class StepResult:
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class GenericEnvClient:
    def __init__(self, base_url: str | None = None) -> None:
        assert base_url

    async def connect(self) -> GenericEnvClient:
        return self

    async def reset(self, **kwargs: Any) -> StepResult:
        return StepResult({"text": f"seed {kwargs['seed']}", "metadata": {}})

    async def step(self, action: dict[str, Any], **kwargs: Any) -> StepResult:
        if set(action) != {"text"}:
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        return StepResult({"text": action["text"]}, reward=len(action["text"]) / 10, done=action["text"] == "end")

    async def close(self) -> None:
        """There is no connection."""
