"""Each kind of bad reward, environment and exit is found on an example of each task, before anything starts."""

import asyncio
import logging
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dagrl.config import Config
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError
from dagrl.rl.functions.agents import AgentHost
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.episodes import Step
from dagrl.rl.functions.process import LoopThread
from dagrl.rl.trial import try_environment, try_rewards
from dagrl.run.model import character_tokenizer
from dagrl.runtime.deadline import Deadline
from tests.unit.rl.conftest import InProcess

pytestmark = pytest.mark.usefixtures("in_process")

TASKS = enumerate(("sums", "sums", "words"))
PROMPTS = [Prompt(f"{number}=", np.array([1, 2]), str(number), f"row {number}", task=task) for number, task in TASKS]


def right(prompts: Any, completions: Any, references: Any, task: Any) -> Any:
    return [float(given == wanted) for given, wanted in zip(completions, references, strict=True)]


def fixed(prompts: Any, completions: Any, references: Any) -> Any:
    return ANSWER


def undefined(prompts: Any, completions: Any, references: Any) -> Any:
    return [float("nan")] * len(prompts)


def fails_for_words(prompts: Any, completions: Any, references: Any, task: Any) -> Any:
    return [1.0 / (name != "words") for name in task]


async def hangs(prompt: str, completion: str, reference: str) -> float:
    await asyncio.sleep(60)
    return 1.0


ANSWER: Any = None


def config(**reward: Any) -> Config:
    keys = {"name": "t", "algorithm": "grpo", "data": {}, "policy": {"generation": {}}}
    return Config.model_validate({**keys, "reward": reward})


def tried(**reward: Any) -> None:
    try_rewards(config(**reward), PROMPTS, character_tokenizer("0123456789="))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "it returned a NoneType; expected: a list of 2 answers"),
        ([None, None], "returned None for every sample"),
        ([1.0], "it returned 1 answers; expected: a list of 2"),
        (1.0, "it returned a float; expected: a list of 2 answers"),
        ("10", "it returned a str; expected: a list of 2 answers"),
        (["good", "good"], "it returned a reward that is not a number: could not convert string to float: 'good'"),
        (torch.ones(2, 2), "it returned a reward that is not a number"),
        ([0.0, 1.0], "reward.weights: no part has the name 'a' or 'x'; the reward has no named parts"),
    ],
)
def test_a_bad_answer_is_an_error_before_the_run(answer: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ANSWER", answer)
    with pytest.raises(ConfigError, match=says):
        tried(**own(fixed, weights={"a": 1.0, "x": 1.0}))


def own(function: Any, **keys: Any) -> dict[str, Any]:
    return {"function": f"{__name__}:{function.__name__}", **keys}


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (own(undefined), "it returned a reward that is not finite"),
        (own(fails_for_words), r"ZeroDivisionError: .* \(.*test_task_trial.py, line \d+\). Tried: the reference of row 2"),
        (own(hangs, batched=False, timeout_s=0.1), r"no answer within reward.timeout_s = 0.1 s \(.*trial.py, line \d+\)"),
        ({"functions": {"a": own(right), "b": own(undefined, tasks=["words"])}}, r"reward.functions.b.function .*row 2"),
    ],
)
def test_a_bad_reward_is_an_error_before_the_run(reward: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tried(**reward)


def test_a_good_reward_gets_the_reference_of_each_task(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO, "dagrl"):
        tried(**own(right))
    texts = [record.getMessage() for record in caplog.records]
    monkeypatch.setattr(f"{__name__}.ANSWER", [{"right": 1.0}] * 2)
    tried(**own(fixed, weights={"late": -1.0}))  # of a part that other samples may have
    assert len(texts) == 2 and "1.0 for the reference of row 0" in texts[0] and "row 2" in texts[1]


class Counts:
    """Wants the sum `1=`, and answers as `kind` says."""

    closed: ClassVar[list[str]] = []

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def reset(self, example: Any) -> Any:
        self.task = example["task"]
        return 3 if self.kind == "number" else None

    def step(self, completion: str) -> Any:
        if self.kind == "words" and self.task == "words":
            raise KeyError("word")
        replies = {"judge": [{"role": "judge", "content": "1"}], "reward": Step("1", reward=float("nan"))}
        return replies.get(self.kind, "2")

    def close(self) -> None:
        self.closed.append(self.task)


def tried_environment(kind: str) -> None:
    checks = "{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    tokenizer = character_tokenizer("0123456789=", "{% for m in messages %}" + checks + "{{ m.content }}{% endfor %}=")
    keys = {"environment.function": f"{__name__}:Counts", "environment.args": {"kind": kind}}
    try_environment(config(function=None).with_keys(keys), PROMPTS, tokenizer)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("number", "Counts: it returned 3; expected: a text.* Tried: row 0. It had no turn yet"),
        ("words", "Counts: KeyError: 'word'.* Tried: row 2. Its turn: the reference"),
        ("judge", "the chat template rejects the reply .*: no judges"),
        ("reward", "it returned the reward nan; expected: a finite number"),
    ],
)
def test_a_bad_environment_is_an_error_before_the_run(kind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tried_environment(kind)


def test_a_good_environment_is_closed_after_its_trial() -> None:
    Counts.closed.clear()
    tried_environment("good")
    assert Counts.closed == ["sums", "words"]


DEADLINE = Deadline(20.0, "reward.timeout_s")


def one(what: str) -> str:
    if what == "exits":
        sys.exit(3)
    return what


def batch(texts: list[str]) -> list[str]:
    return [one(text) for text in texts]


def lazily(texts: list[str]) -> Iterator[str]:
    return map(one, texts)


async def batch_of_a_coroutine(texts: list[str]) -> list[str]:
    return batch(texts)


async def coroutine(text: str) -> str:
    return one(text)


class Environment:
    def reset(self, example: object) -> None: ...

    def step(self, completion: str) -> Any:
        return one(completion)


class AsyncEnvironment(Environment):
    async def step(self, completion: str) -> str:
        return one(completion)


def agent(example: Mapping[str, str], endpoint: object) -> str:
    return one(example["text"])


async def async_agent(example: Mapping[str, str], endpoint: object) -> str:
    return one(example["text"])


def check(failure: str | Failed) -> None:
    message = failure.message if isinstance(failure, Failed) else failure
    line = one.__code__.co_firstlineno + 2
    assert message == f"RuntimeError: it called sys.exit(3) ({__file__}, line {line})"


BATCHED = ("batch", "lazily", "batch_of_a_coroutine")


@pytest.mark.parametrize("name", [*BATCHED, "one", "coroutine", "Environment", "AsyncEnvironment"])
def test_a_function_that_exits_fails_for_its_row(name: str) -> None:
    arguments, batched = "episodes" if "Environment" in name else "named", name in BATCHED
    process = InProcess(f"{__name__}:{name}", "reward.function", batched, DEADLINE, DEADLINE, arguments)

    async def in_order() -> list[Any]:
        turns = [(text, {"turns": [text], "arguments": {}, "example": {}}) for text in ("before", "exits", "after")]
        return [await process.ask([[text], [turn if arguments == "episodes" else {}]]) for text, turn in turns]

    before, failed, after = asyncio.run(in_order())
    check(failed if isinstance(failed, str) else failed[0])
    assert (before, after) == (["before"], ["after"])


@pytest.mark.parametrize("function", [agent, async_agent])
def test_an_agent_that_exits_fails_for_its_episode(function: Any) -> None:
    answers: dict[int, Future[Any]] = {number: Future() for number in range(2)}
    loop = LoopThread("agents")
    loop.start()
    host = AgentHost(function, DEADLINE, loop.spawn, lambda number, answer: answers[number].set_result(answer))
    for number, text in enumerate(("exits", "goes on")):
        host(number, {"example": {"text": text}, "endpoint": {"base_url": "", "api_key": "", "model": ""}})
    failed, fine = (future.result(20.0) for future in answers.values())
    loop.stop()
    check(failed)
    assert fine == "goes on"
