"""Environments: functions that reply to a completion, so that a sequence has several turns.

`environment.function` takes `(prompts, completions, references)`, three lists of texts of equal length. A completion is
everything after the prompt so far: the policy's turns and the environment's replies. The function returns the next reply to
each, or None if the sequence has ended. With `batched: false` it takes one text of each. It may be a coroutine function.
It runs like a reward function (`dagrl.rl.functions`). A sequence for which it raises or hangs ends there, is counted
as failed and is excluded from the loss.

    def calculator(prompts, completions, references):
        return [f"={evaluate(text)}\\n" if text.endswith("?") else None for text in completions]

Replies are tokenized without special tokens and excluded from the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagrl.config import EnvironmentConfig
from dagrl.data.tokenization import Prompt
from dagrl.rl.functions.answers import Answers, Failed
from dagrl.rl.functions.runner import FunctionRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ENDED = "stop"
FAILED = "environment_failed"


@dataclass(frozen=True)
class Reply:
    """The environment's reply, or None and the reason why the sequence ends; `failure` says what it raised."""

    text: str | None
    reason: str = ENDED
    failure: str = ""


class EnvironmentRunner:
    """Runs the configured environment. Use it as a context manager."""

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises ConfigError if the import path is wrong."""
        assert config.function is not None
        self.max_turns = config.max_turns
        self.workers = config.num_workers
        self._tokenizer, self._longest = tokenizer, max(map(len, tokenizer.get_vocab()))
        self._runner = FunctionRunner.configured(config.function, "environment", config, _checked)

    def __enter__(self) -> Self:
        self._runner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.close()

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> Future[list[Reply]]:
        """Asks for the replies to n sequences, in one call in the background."""
        replies: Future[list[Reply]] = Future()
        references = [prompt.reference for prompt in prompts]
        asked = self._runner.submit([prompt.text for prompt in prompts], completions, references)
        asked.add_done_callback(lambda done: _pass_on(done, replies))
        return replies

    def encode(self, text: str, most: int) -> Sequence[int]:
        """Returns the tokens of a reply, or a prefix of more than `most` tokens if the reply is longer than that.

        Tokenizing takes a second and 400 MB per megabyte of text, and an environment may reply with all its output.
        """
        enough = (most + 1) * self._longest
        if len(text) > enough and len(first := self._tokens(text[:enough])) > most:
            return first
        return self._tokens(text)  # also if the prefix has few: a tokenizer may drop characters

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _pass_on(asked: Future[Answers], replies: Future[list[Reply]]) -> None:
    if asked.cancelled():
        replies.cancel()
    elif (error := asked.exception()) is not None:
        replies.set_exception(error)
    else:
        replies.set_result([_reply(answer) for answer in asked.result()])


def _reply(answer: Any) -> Reply:
    return Reply(None, FAILED, answer.message) if isinstance(answer, Failed) else Reply(answer)


def _checked(answer: Any) -> str | None:
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"it returned {answer!r}; expected: a text, or None if the sequence has ended")
    try:
        (answer or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it returned a text that UTF-8 cannot encode: {error}") from error
    return answer
