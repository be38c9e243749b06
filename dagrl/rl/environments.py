"""Environments: objects that answer the policy's turns, one for each sequence.

`environment.function` names a class, or a function that returns an object, with these methods, plain or `async`:

    class Calculator:
        def reset(self, example):            # prompt, reference, messages, columns, task, seed, group_seed
            self.left = 3                    # may return other first messages, or another text, in place of the prompt's

        def step(self, completion):          # after each turn of the policy, with its text
            self.left -= 1
            return Step(f"={evaluate(completion)}\\n", reward=0.1) if self.left else None

        def close(self):                     # optional: when the sequence has ended
            ...

`step` returns the reply (a text, or messages for the chat template), a `Step` of reply and reward, or None if the sequence
has ended. It is also asked about the last of `max_turns` turns, for its reward. All sequences of a group have one
`group_seed`. Environments run in processes of their own, with deadlines (`dagrl.rl.functions.episodes`). A sequence whose
environment raises or hangs ends there, is counted as failed and is excluded from the loss. Replies are tokenized without
special tokens and excluded from the loss. After a lost process, an environment is made again and given the earlier turns: it
must answer equal turns equally.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from dagrl.config import EnvironmentConfig, Json
from dagrl.data.media import shows_images
from dagrl.data.tokenization import Prompt, with_opening
from dagrl.errors import ConfigError, UserError
from dagrl.imports import check_arguments, load_callable, require_package
from dagrl.rl.functions.answers import Answers, Failed, join_futures
from dagrl.rl.functions.episodes import Step as Step
from dagrl.rl.functions.runner import FunctionRunner
from dagrl.rl.media import RolloutMedia

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TOOLS = "dagrl.rl.tools:ToolEnvironment"
ENDED = "stop"
FAILED = "environment_failed"


def check_environment(config: EnvironmentConfig) -> None:
    """Raises ConfigError for an import path, a class or arguments that cannot make an environment."""
    first, *others = [key for key in ("agent", "tools", "function", "args") if getattr(config, key)]
    if others and (first, others) != ("function", ["args"]):
        raise ConfigError(f"environment.{first} is set, and so is environment.{others[0]}; leave one of them out")
    if config.agent is not None:
        function = load_callable(config.agent, "environment.agent")
        for package in ("starlette", "uvicorn", *getattr(function, "requires", ())):
            require_package(package, "environment.agent")
        check_arguments(function, {}, config.agent, "environment.agent", positional=["example", "endpoint"])
        return
    if config.tools:
        from dagrl.rl.tools import load_tools, tool_schemas

        require_package("vllm", "environment.tools")
        tool_schemas(load_tools(config.tools))
        return
    assert config.function is not None
    key, factory = "environment.function", load_callable(config.function, "environment.function")
    for package in getattr(factory, "requires", ()):
        require_package(package, key)
    missing = [name for name in ("reset", "step") if isinstance(factory, type) and not hasattr(factory, name)]
    if missing:
        raise ConfigError(f"{key}: {config.function} has no method {' or '.join(missing)}; docs/rewards.md has an example")
    check_arguments(factory, config.args, config.function, "environment.args")
    for name, argument in (("reset", "example"), ("step", "completion")):
        if inspect.isfunction(method := inspect.getattr_static(factory, name, None)):
            check_arguments(method, {}, f"{config.function}.{name}", key, positional=["self", argument])


@dataclass(frozen=True)
class Question:
    """An episode whose turn has ended: its key, its prompt and seed, and the text of each of its turns.

    Without turns, it asks for the answer of `reset`.
    """

    key: str
    prompt: Prompt
    seed: int
    turns: Sequence[str]
    group_seed: int = 0


@dataclass(frozen=True)
class Reply:
    """The environment's reply, a text or messages, or None and the reason why the sequence ends; `failure` says what it
    raised.

    `prompt` is what `reset` gave in place of the question's prompt.
    """

    content: str | list[dict[str, Any]] | None
    reason: str = ENDED
    failure: str = ""
    reward: float | None = None
    prompt: Prompt | None = None


class EnvironmentRunner:
    """Runs the configured environment in `workers` processes. Use it as a context manager."""

    def __init__(
        self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerFast, media: RolloutMedia | None = None
    ) -> None:
        """With `media`, replies may have images. Raises ConfigError if the import path is wrong."""
        self._media = media
        self.max_turns = config.max_turns
        self.workers = config.num_workers or 1
        self.opens = not config.tools  # whether `reset` may give the first messages
        self._closing_s = config.timeout_s
        self._stack = ExitStack()
        path = TOOLS if config.tools else config.function
        assert path is not None
        self._arguments: dict[str, Json] = dict(config.args)
        if config.tools:
            saved = self._stack.enter_context(TemporaryDirectory(prefix="dagrl-"))
            tokenizer.save_pretrained(saved)  # copied files may name a class that reads texts otherwise
            self._arguments = {"tools": list(config.tools), "tokenizer": saved, "tool_parser": config.tool_parser}
        self._tokenizer = tokenizer
        single = config.model_copy(update={"num_workers": 1})
        self._runners = [
            FunctionRunner(path, "environment", single, _checked, arguments="episodes", prepare=self._arguments)
            for _ in range(self.workers)
        ]
        self._open: dict[str, int] = {}  # the worker of each episode
        self._closing: set[Future[Answers]] = set()

    def __enter__(self) -> Self:
        for runner in self._runners:
            self._stack.enter_context(runner)
        return self

    def __exit__(self, *exception: object) -> None:
        for key in list(self._open):
            self._close(key)
        wait(set(self._closing), self._closing_s)
        self._stack.close()

    def submit(self, worker: int, questions: Sequence[Question]) -> Future[list[Reply]]:
        """Asks for the replies to n episodes, in one call in the background. An episode always has the same worker."""
        self._open |= dict.fromkeys((question.key for question in questions), worker)
        requests = [
            {
                "arguments": self._arguments,
                "turns": list(question.turns),
                "example": example_of(question.prompt, question.seed, question.group_seed, self._media),
                "images": None if self._media is None else self._media.store.limits,
            }
            for question in questions
        ]
        answers = self._runners[worker].submit([question.key for question in questions], requests)
        return join_futures([answers], lambda: [*map(self._reply, questions, answers.result())])

    def close(self, key: str) -> None:
        """Closes the environment of an episode that has ended, in the background."""
        if key in self._open:
            self._close(key).add_done_callback(_warn_of_failure)

    def _reply(self, question: Question, answer: Any) -> Reply:
        if isinstance(answer, Failed):
            return Reply(None, FAILED, answer.message)
        if isinstance(answer.reply, list):
            if self._media is not None:
                answer = replace(answer, reply=self._media.keep(answer.reply))
            elif any(map(shows_images, answer.reply)):
                return Reply(None, FAILED, "its reply has images; for a model that takes some, set data.images.enabled=true")
        if not question.turns:
            return self._opening(question.prompt, answer)
        return Reply(answer.reply, reward=answer.reward)

    def _opening(self, prompt: Prompt, answer: Step) -> Reply:
        if answer.reward is not None:
            return Reply(None, FAILED, f"reset returned the reward {answer.reward!r}, before the first turn")
        if answer.reply is None:
            return Reply(None)
        try:
            images = None
            if self._media is not None:
                images = self._media.images([] if isinstance(answer.reply, str) else answer.reply)
            return Reply(None, prompt=with_opening(prompt, answer.reply, self._tokenizer, images))
        except UserError as error:
            return Reply(None, FAILED, f"reset returned {answer.reply!r:.80}: {error}")

    def _close(self, key: str) -> Future[Answers]:
        closing = self._runners[self._open.pop(key)].submit([key], [None])
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing


def prompt_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns the conversation of a prompt; a plain one is a question of the user."""
    return [dict(message) for message in prompt.messages] or [{"role": "user", "content": prompt.text}]


def example_of(prompt: Prompt, seed: int, group_seed: int, media: RolloutMedia | None = None) -> dict[str, Any]:
    """Returns the example that an environment or agent gets. `seed` is the sequence's own.

    `prompt` is the text that the policy sees, `messages` the conversation before the chat template renders it. Its images
    are URLs of files in the run's directory.
    """
    return {
        "prompt": prompt.text,
        "reference": prompt.reference,
        "messages": prompt_messages(prompt) if media is None or prompt.media is None else media.shown(prompt),
        "columns": dict(prompt.columns),
        "task": prompt.task,
        "seed": seed,
        "group_seed": group_seed,
    }


def _warn_of_failure(closed: Future[Answers]) -> None:
    if not closed.cancelled() and closed.exception() is None and isinstance(answer := closed.result()[0], Failed):
        logger.warning("environment.function: close failed: %s", answer.message)


def _checked(answer: Any) -> Step:
    step = answer if isinstance(answer, Step) else Step(answer)
    reply = step.reply
    is_messages = isinstance(reply, list) and all(isinstance(message, dict) for message in reply)
    if not (reply is None or isinstance(reply, str) or is_messages):
        raise TypeError(f"it returned {answer!r}; expected: a text, messages, a Step, or None if the sequence has ended")
    if step.reward is not None and not (isinstance(step.reward, int | float) and math.isfinite(step.reward)):
        raise TypeError(f"it returned the reward {step.reward!r}; expected: a finite number, or None")
    try:
        json.dumps(reply, ensure_ascii=False, default=lambda value: type(value).__name__).encode()  # of images
    except UnicodeEncodeError as error:
        raise ValueError(f"it returned a text that UTF-8 cannot encode: {error}") from error
    return step
