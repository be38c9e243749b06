"""Environments: what answers a completion, so that a sequence has several turns.

An environment is a function named by `environment.function`. It takes `(prompts, completions, references)`, three lists of
texts of one length, where a completion is everything after the prompt so far: the policy's turns and the environment's own
answers. It returns for each what it says next, or None when the sequence has ended. With `batched: false` it takes one text
of each; it may be a coroutine function. It runs as rewards do (`dagrl.function_runner`): under a deadline, and a sequence
for which it raises or hangs ends there, is counted, and teaches nothing.

    def calculator(prompts, completions, references):
        return [f"={evaluate(text)}\\n" if text.endswith("?") else None for text in completions]

Its texts are tokenized without special tokens, and are no part of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagrl.config import EnvironmentConfig
from dagrl.data.tokenization import Prompt
from dagrl.function_runner import Answers, Failed, FunctionRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ENDED = "stop"
FAILED = "environment_failed"


@dataclass(frozen=True)
class Reply:
    """What the environment says, or None and the reason why the sequence ends; `failure` is what it raised."""

    text: str | None
    reason: str = ENDED
    failure: str = ""


class EnvironmentRunner:
    """Asks the configured environment; use it as a context manager."""

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises ConfigError when the import path leads nowhere."""
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
        """The environment's replies to n sequences, made beside the caller in one call."""
        replies: Future[list[Reply]] = Future()
        references = [prompt.reference for prompt in prompts]
        asked = self._runner.submit([prompt.text for prompt in prompts], completions, references)
        asked.add_done_callback(lambda done: _pass_on(done, replies))
        return replies

    def encode(self, text: str, most: int) -> Sequence[int]:
        """The tokens of a reply; where they are sure to be more than `most`, only enough of the first to show that.

        Tokenizing takes a second and 400 MB for each megabyte of text: all that an environment prints may be one's reply.
        """
        enough = (most + 1) * self._longest
        if len(text) > enough and len(first := self._tokens(text[:enough])) > most:
            return first
        return self._tokens(text)  # also where the first part has few: a tokenizer may drop characters

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
        raise TypeError(f"it returned {answer!r}; expected: a text, or None when the sequence has ended")
    try:
        (answer or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it returned a text that UTF-8 cannot hold: {error}") from error
    return answer
