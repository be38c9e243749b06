"""Environments of verifiers and OpenEnv, over doubles of their packages; tests/agents has the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagrl.config import DataConfig, EnvironmentConfig
from dagrl.data import load_splits
from dagrl.data.tokenization import Prompt, encode_prompts
from dagrl.errors import ConfigError
from dagrl.rl.adapters.openenv import action_reader, observation_text
from dagrl.rl.environments import FAILED, EnvironmentRunner, Question, Reply
from dagrl.run.model import character_tokenizer
from tests.unit.rl.in_process import in_process

__all__ = ["in_process"]

pytestmark = pytest.mark.usefixtures("in_process")

DOUBLES = Path(__file__).parent / "doubles"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))), TEMPLATE)
SCHEMA = {"properties": {"text": {"type": "string"}, "metadata": {}}, "required": ["text"]}


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOUBLES))


@contextmanager
def running(function: str, args: dict[str, Any], task: str, task_args: dict[str, Any]) -> Iterator[Any]:
    prompts = encode_prompts(load_splits(DataConfig(task=task, task_args=task_args)).train, TOKENIZER)
    with EnvironmentRunner(EnvironmentConfig(function=function, args=args), TOKENIZER) as runner:

        def ask(number: int, *turns: str) -> Reply:
            prompt: Prompt = prompts[number]
            return runner.submit(0, [Question(prompt.source, prompt, 7, list(turns))]).result()[0]

        yield ask


def verifiers_running() -> Any:
    return running(
        "dagrl.rl.adapters.verifiers:VerifiersEnvironment",
        {"name": "adder"},
        "dagrl.rl.adapters.verifiers:examples",
        {"name": "adder", "held_out": 1},
    )


def test_a_loop_of_verifiers_is_an_episode() -> None:
    with verifiers_running() as ask:
        opening = ask(2).prompt
        assert opening is not None and opening.text == "<user>add 2<eos><assistant>" and opening.reference == "2"
        assert ask(2, "3") == Reply("<user>it is 5<eos><assistant>")
        assert ask(2, "3", "4") == Reply(None, reward=9.0)


def test_an_error_and_a_changed_conversation_cost_their_sequence() -> None:
    with verifiers_running() as ask:
        for turn, message in (("fail", "told to fail"), ("9", "it may only append messages"), ("x", "invalid literal")):
            ask(1)
            reply = ask(1, turn)
            assert reply.reason == FAILED and message in reply.failure


def test_an_environment_that_is_not_installed_is_found_with_the_data() -> None:
    with pytest.raises(ConfigError, match="verifiers cannot load the environment 'other'"):
        load_splits(DataConfig(task="dagrl.rl.adapters.verifiers:examples", task_args={"name": "other"}))


def test_a_session_of_openenv_is_an_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_actions.py").write_text("def act(text):\n    return {'text': text} if text != 'wrong' else {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    args = {"url": "http://localhost:1", "act": "own_actions:act"}
    task = "dagrl.rl.adapters.openenv:episodes"
    with running("dagrl.rl.adapters.openenv:OpenEnvironment", args, task, {"count": 3, "seed": 4}) as ask:
        assert [ask(number).prompt.text for number in range(3)] == ["seed 4", "seed 5", "seed 6"]
        assert ask(1, "hello") == Reply("hello", reward=0.5)
        assert ask(1, "hello", "wrong").text == "error: Server error: Invalid message (code: VALIDATION_ERROR)\n"
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
def test_a_turn_is_an_action(text: str, action: dict[str, Any]) -> None:
    assert action_reader(SCHEMA)(text) == action


def test_a_turn_that_is_no_action_says_what_is_expected() -> None:
    two = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}, "required": ["row", "column"]}
    with pytest.raises(ValueError, match="expected a JSON object with row, column"):
        action_reader(two)("3")
    one = {"properties": {"row": {"type": "integer"}}}
    assert action_reader(one)("3") == {"row": 3}


def test_observations_are_their_text_or_json() -> None:
    assert observation_text({"text": "a", "reward": 1.0, "done": False, "metadata": {}}) == "a"
    assert observation_text({"text": "ä", "left": 2}) == '{"text": "ä", "left": 2}'
