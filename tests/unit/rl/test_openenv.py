"""Environments of OpenEnv servers, with a double of the client; tests/agents has a real server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dagrl.config import DataConfig, EnvironmentConfig
from dagrl.data import load_splits
from dagrl.data.tokenization import encode_prompts
from dagrl.rl.environments import EnvironmentRunner, Question, Reply
from dagrl.rl.openenv import CLIENT, action_reader, observation_text
from dagrl.run.model import character_tokenizer
from tests.unit.rl.in_process import in_process

__all__ = ["in_process"]

SCHEMA = {"properties": {"text": {"type": "string"}, "metadata": {}}, "required": ["text"]}


@dataclass
class StepResult:
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class GenericEnvClient:
    """A double of OpenEnv's client. Its server repeats texts, and ends the episode after `end`."""

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
        """Closes nothing."""


@pytest.mark.usefixtures("in_process")
def test_an_episode_is_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ModuleType(CLIENT)
    client.GenericEnvClient = GenericEnvClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, CLIENT, client)
    (tmp_path / "own_actions.py").write_text("def act(text):\n    return {'text': text} if text != 'wrong' else {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    args = {"url": "http://localhost:1", "act": "own_actions:act"}
    config = EnvironmentConfig(function="dagrl.rl.openenv:OpenEnvironment", args=args)  # type: ignore[arg-type]
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    examples = load_splits(DataConfig(task="dagrl.rl.openenv:episodes", task_args={"count": 3, "seed": 4})).train
    prompts = encode_prompts(examples, tokenizer)
    with EnvironmentRunner(config, tokenizer) as runner:

        def ask(number: int, *turns: str) -> Reply:
            question = Question(prompts[number].source, prompts[number], 7, list(turns))
            return runner.submit(0, [question]).result()[0]

        openings = [ask(number).prompt for number in range(3)]
        assert [opening and opening.text for opening in openings] == ["seed 4", "seed 5", "seed 6"]
        assert ask(1, "hello") == Reply("hello", reward=0.5)
        assert ask(1, "hello", "wrong").content == "error: Server error: Invalid message (code: VALIDATION_ERROR)\n"
        assert ask(1, "hello", "wrong", "end") == Reply(None, reward=0.3)


@pytest.mark.parametrize(
    "text, action",
    [
        ("hello", {"text": "hello"}),
        (" 12 ", {"text": "12"}),
        ('{"text": "a", "metadata": {}}', {"text": "a", "metadata": {}}),
        ('I say:\n```json\n{"text": "b"}\n```', {"text": "b"}),
    ],
)
def test_turns_become_actions(text: str, action: dict[str, Any]) -> None:
    assert action_reader(SCHEMA)(text) == action


def test_turns_that_are_no_actions_are_rejected() -> None:
    two = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}, "required": ["row", "column"]}
    with pytest.raises(ValueError, match="expected a JSON object with row, column"):
        action_reader(two)("3")
    assert action_reader({"properties": {"row": {"type": "integer"}}})("3") == {"row": 3}


def test_observations_are_text_or_json() -> None:
    assert observation_text({"text": "a", "reward": 1.0, "done": False, "metadata": {}}) == "a"
    assert observation_text({"text": "ä", "left": 2}) == '{"text": "ä", "left": 2}'
