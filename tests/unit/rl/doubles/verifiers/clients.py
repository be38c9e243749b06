"""The client that an environment asks for each turn."""

from __future__ import annotations

from typing import Any


class Client:
    def __init__(self, client_or_config: Any) -> None:
        self._client = client_or_config

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError
