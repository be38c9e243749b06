"""OpenAI's protocol: the requests that the endpoint takes, its answers and its errors.

Parameters with no effect here are accepted at their neutral values, and those for OpenAI's own accounts are ignored. Any
other parameter is an error that names it. Answers are never limited to a grammar, so that log-probabilities are the policy's
own: with any `tool_choice` but `none`, the policy decides whether it calls. Extensions, with vLLM's names where it has them:
`return_token_ids`, `chat_template_kwargs`, and `policy_versions` in every answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, PositiveInt, ValidationError, field_validator, model_validator

from dagrl.data.messages import content_of, with_parsed_arguments
from dagrl.errors import DagrlError
from dagrl.rl.media import MEDIUM

MODEL = "policy"  # the name of the model

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
}
"""Parameters that are accepted with these values only."""

MAX_STOP_BYTES = 256  # maximum size of a request's stop strings

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class EndpointError(DagrlError):
    """A request that is answered with an error in OpenAI's format."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ChatBody(BaseModel, extra="forbid"):
    """`POST /v1/chat/completions`."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: tuple[str, ...] = Field(default=(), max_length=4)
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None and name not in IGNORED and not (name in NEUTRAL and value in NEUTRAL[name])
        }

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _some_text(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop) or sum(len(text.encode()) for text in stop) > MAX_STOP_BYTES:
            raise ValueError(f"stop strings must not be empty, or have more than {MAX_STOP_BYTES} bytes in all")
        return stop

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the policy may call."""
        return [] if self.tool_choice == "none" else self.tools


def read_body(content: bytes) -> ChatBody:
    """Returns the request. Raises EndpointError that names the first parameter that is wrong."""
    try:
        body = ChatBody.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(ChatBody.model_fields))
            raise EndpointError(
                f"{name} = {first['input']!r:.80} is not supported here. Leave it out; supported are: {known}",
                param=name,
                code="unsupported_parameter",
            ) from error
        place = ".".join(map(str, first["loc"]))
        value = "" if name is None or first["type"] == "missing" else f"; found {first['input']!r:.80}"
        raise EndpointError(f"{place or 'the request'}: {first['msg']}{value}", param=name) from error
    if body.model != MODEL:
        raise EndpointError(
            f"there is no model {body.model!r:.80}; ask for {MODEL!r}", status=404, param="model", code="model_not_found"
        )
    return body


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages for chat templates: contents as texts, `developer` as `system`, and parsed arguments of calls.

    Raises EndpointError for contents that are not text.
    """
    return [_plain(dict(message), f"messages.{index}") for index, message in enumerate(messages)]


def _plain(message: dict[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise EndpointError(f"{place}.role is missing", param="messages")
    role = "system" if message["role"] == "developer" else message["role"]
    if message.get("function_call") is not None or role == "function":
        raise EndpointError(f"{place}: function_call is not supported; use tool_calls and the role tool", param="messages")
    content = content_of(message) or ""
    content = content if _has_images(content) else _text(content, place)
    message = {name: value for name, value in message.items() if value is not None and name != "refusal"}
    message |= {"role": role, "content": content}
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
            raise EndpointError(f"{place}.tool_calls: a call has no function with a name and arguments", param="messages")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [*map(with_parsed_arguments, calls)]
    return message


def _has_images(content: Any) -> bool:
    """Whether a content is of texts and images that the run has kept."""
    parts = content if isinstance(content, list) and all(isinstance(part, dict) for part in content) else []
    return any(MEDIUM in part for part in parts) and all(MEDIUM in part or part.get("type") == "text" for part in parts)


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts}
    raise EndpointError(
        f"{place}.content has {', '.join(map(str, kinds))}; expected: texts, and with data.images.enabled images",
        param="messages",
    )
