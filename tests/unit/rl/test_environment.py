"""Environments of users and of OpenEnv servers (a double of the client), and tools: state, rewards by turn, replies."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagrl.config import Config, DataConfig, EnvironmentConfig, RewardConfig
from dagrl.data import Example, Message, load_splits
from dagrl.data.chat import chat_of
from dagrl.data.examples import with_tools
from dagrl.data.replies import reply_text
from dagrl.data.tokenization import Prompt, encode_prompts
from dagrl.errors import ConfigError
from dagrl.rl.environments import ENDED, FAILED, EnvironmentRunner, Question, Reply, Step, check_environment
from dagrl.rl.openenv import CLIENT, action_reader, observation_text
from dagrl.rl.rewards import RewardRunner, SampleReward, rewards_of
from dagrl.rl.rollout.episodes import Episode, Sample
from dagrl.rl.rollout.scoring import with_turn_rewards
from dagrl.rl.tools import load_tools, tool_schemas
from dagrl.run.model import character_tokenizer

pytestmark = pytest.mark.usefixtures("in_process")

SURROGATE = b"caf\xe9".decode("utf-8", "surrogateescape")
REPLIES = {"empty": "", "accent": "café", "end": None, "number": 3, "surrogate": SURROGATE}


class Says:
    def reset(self, example: Any) -> None: ...

    def step(self, completion: str) -> Any:
        return REPLIES[completion]


class Counts:
    """Counts the turns of its episode down from the column `left`, and notes what happens."""

    def __init__(self, notes: str, bonus: float = 0.0) -> None:
        self.notes, self.bonus = Path(notes), bonus

    def note(self, what: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{self.name} {what}\n")

    def reset(self, example: Any) -> Any:
        self.name, self.left = example["prompt"], example["columns"]["left"]
        self.note(f"reset {example['seed']}")

    def step(self, completion: str) -> Any:
        if completion == "raise":
            raise ValueError("no such turn")
        self.left -= 1
        self.note(f"step {completion}")
        return Step(f"{self.left} left" if self.left else None, reward=len(completion) + self.bonus)

    def close(self) -> None:
        self.note("close")


class CountsAsync(Counts):
    async def step(self, completion: str) -> Any:
        await asyncio.sleep(3600 if completion == "wait" else 0.2)
        return super().step(completion)


class Sleeps(Counts):
    def step(self, completion: str) -> Any:
        time.sleep(0.2)
        return super().step(completion)


class Opens(Counts):
    """Gives the prompt that is in the column `opening`."""

    def reset(self, example: Any) -> Any:
        super().reset(example)
        return example["columns"].get("opening")


class Ticks(Counts):
    """A task of it goes on between turns."""

    async def reset(self, example: Any) -> None:
        super().reset(example)
        self.ticks = 0
        self.task = asyncio.create_task(self.tick())

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1

    async def step(self, completion: str) -> str:
        return f"{self.ticks > 3} {self.task.done()}"


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
TEMPLATED = character_tokenizer("0123456789+=<>" + "".join(map(chr, range(97, 123))), TEMPLATE)


class Episodes:
    """Episodes of an environment, with the notes that it wrote."""

    def __init__(self, runner: EnvironmentRunner, notes: Path) -> None:
        self.runner, self._notes = runner, notes

    def ask(self, *episodes: tuple[str, int, list[str]]) -> list[Reply]:
        """Asks for the last turn of each episode: its name, its number of turns, and the texts of its turns."""
        prompts = [Prompt(name, np.array([1]), "", "row 0", columns={"left": left}) for name, left, _ in episodes]
        asked = zip(prompts, episodes, strict=True)
        return self.runner.submit(0, [Question(f"key of {one.text}", one, 7, turns) for one, (*_, turns) in asked]).result()

    @property
    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines()


@contextmanager
def episodes(name: str, tmp_path: Path, **args: Any) -> Iterator[Episodes]:
    notes = tmp_path / "notes"
    config = EnvironmentConfig(function=f"{__name__}:{name}", args={"notes": str(notes), **args}, timeout_s=1.0)
    with EnvironmentRunner(config, character_tokenizer("0123456789")) as runner:
        yield Episodes(runner, notes)


@pytest.mark.parametrize("name", ["Counts", "CountsAsync"])
def test_each_episode_has_its_state_and_rewards_by_turn(name: str, tmp_path: Path) -> None:
    with episodes(name, tmp_path, bonus=0.5) as run:
        assert run.ask(("a", 2, ["x"]), ("b", 3, ["xy"])) == [Reply("1 left", reward=1.5), Reply("2 left", reward=2.5)]
        assert run.ask(("b", 3, ["xy", ""])) == [Reply("1 left", reward=0.5)]
        assert run.ask(("a", 2, ["x", "xyz"])) == [Reply(None, ENDED, reward=3.5)]
    notes = ["a reset 7", "b reset 7", "a step x", "b step xy", "b step ", "a step xyz", "a close", "b close"]
    assert sorted(run.notes) == sorted(notes), "an episode that ended is closed at once, the other with the run"


@pytest.mark.parametrize(
    "opening, text",
    [
        ("12+", "<system>sum<user>12+<assistant>"),
        ([{"role": "user", "content": "1"}, {"role": "user", "content": "2"}], "<system>sum<user>1<user>2<assistant>"),
        ([{"role": "system", "content": "0"}, {"role": "user", "content": "3"}], "<system>0<user>3<assistant>"),
    ],
)
def test_reset_may_give_the_first_messages_of_a_conversation(opening: Any, text: str, tmp_path: Path) -> None:
    conversation = ({"role": "system", "content": "sum"}, {"role": "user", "content": "1+1="})
    assert opened(tmp_path, None, messages=conversation) == Reply(None)
    asked = opened(tmp_path, opening, messages=conversation)
    assert asked.prompt is not None and asked.prompt.text == text and asked.prompt.reference == "2"
    assert asked.prompt.tokens.tolist() == TEMPLATED(text, add_special_tokens=False)["input_ids"]


def opened(tmp_path: Path, opening: Any, **fields: Any) -> Reply:
    """Returns the environment's reply before the first turn of an episode."""
    prompt = Prompt("1+1=", np.array([1]), "2", "row 0", columns={"left": 2, "opening": opening}, **fields)
    config = EnvironmentConfig(function=f"{__name__}:Opens", args={"notes": str(tmp_path / "notes")})
    with EnvironmentRunner(config, TEMPLATED) as runner:
        (reply,) = runner.submit(0, [Question("key", prompt, 7, [])]).result()
    return reply


@pytest.mark.parametrize("opening, message", [([], "found no messages"), (3, "it returned 3; expected: a text")])
def test_a_reset_without_a_prompt_fails_its_sequence(opening: Any, message: str, tmp_path: Path) -> None:
    actual = opened(tmp_path, opening)
    assert actual.reason == FAILED and message in actual.failure


def test_tasks_of_an_environment_run_between_turns(tmp_path: Path) -> None:
    with episodes("Ticks", tmp_path) as run:
        run.ask(("a", 2, []))
        time.sleep(0.3)
        assert run.ask(("a", 2, ["x"])) == [Reply("True False")]


def test_a_rollout_that_ends_closes_its_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with episodes("Counts", tmp_path) as run:
        assert run.ask(("a", 9, [])) == [Reply(None)]
        run.ask(("a", 9, ["x"]))  # continues what reset began
        run.runner.close("key of a")
        run.ask(("a", 9, ["y"]))  # of the same key, such as the next validation
        assert run.notes == ["a reset 7", "a step x", "a close", "a reset 7", "a step y"]
        run.runner.close("key of a")
    assert run.notes[-1] == "a close" and not caplog.messages, "a run that stops waits for it"


@pytest.mark.parametrize("name", ["Sleeps", "CountsAsync"])
def test_episodes_step_at_the_same_time(name: str, tmp_path: Path) -> None:
    with episodes(name, tmp_path) as run:
        run.ask(("first", 9, ["x"]))
        began = time.monotonic()
        answers = run.ask(*((f"episode {number}", 9, ["x"]) for number in range(20)))
        assert time.monotonic() - began < 2.0, "twenty steps of 0.2 s"
    assert answers == [Reply("8 left", reward=1.0)] * 20


def test_an_episode_that_raises_fails_alone(tmp_path: Path) -> None:
    with episodes("Counts", tmp_path) as run:
        good, bad = run.ask(("a", 9, ["x"]), ("b", 9, ["raise"]))
        assert good == Reply("8 left", reward=1.0)
        assert bad == Reply(None, FAILED, bad.failure) and bad.failure.startswith("ValueError: no such turn (")
        run.ask(("c", 9, []))
        assert "b close" in run.notes, "it is closed at once"


def test_an_async_step_that_hangs_is_cancelled_alone(tmp_path: Path) -> None:
    with episodes("CountsAsync", tmp_path) as run:
        bad, good = run.ask(("b", 9, ["wait"]), ("a", 9, ["x"]))
    assert good == Reply("8 left", reward=1.0)
    assert bad.content is None and bad.reason == FAILED
    assert bad.failure.startswith("no answer within environment.timeout_s = 1 s (")


def test_turn_rewards_are_a_weighted_part_of_the_reward() -> None:
    """With `reward.function: null` they are the whole reward."""
    prompt = Prompt("1", np.array([1]), "", "row 0")
    samples = [Sample(prompt, Episode(prompt, 0, 8, turn_rewards=turns), "") for turns in ([1.0, None, 2.0], [], [4.0])]
    reward = RewardConfig(function=None, weights={"environment": 0.5})
    with RewardRunner(reward) as runner:
        answers = runner.submit(["1"] * 3, [""] * 3, [""] * 3).result()
    assert answers == [SampleReward(0.0)] * 3
    config = Config.model_construct(reward=reward)
    actual = with_turn_rewards(config, rewards_of(answers), samples)
    assert actual.values.tolist() == [1.5, 0.0, 2.0]
    assert {name: values.tolist() for name, values in actual.parts.items()} == {"environment": [3.0, 0.0, 4.0]}


def test_replies() -> None:
    """Texts and None are replies. Anything else ends its own sequence as failed."""
    questions = [Question(text, Prompt("1", np.array([1]), "", "row 0"), 0, [text]) for text in REPLIES]
    with EnvironmentRunner(EnvironmentConfig(function=f"{__name__}:Says"), character_tokenizer("0123456789")) as environment:
        actual = environment.submit(0, questions).result()
    assert actual[:3] == [Reply(""), Reply("café"), Reply(None, ENDED)]
    assert [(reply.content, reply.reason) for reply in actual[3:]] == [(None, FAILED)] * 2
    assert actual[3].failure.startswith("it returned 3; expected: a text, messages, a Step, or None")
    assert actual[4].failure.startswith("it returned a text that UTF-8 cannot encode: ")


SCHEMA = {"properties": {"text": {"type": "string"}, "metadata": {}}, "required": ["text"]}


class GenericEnvClient:
    """A double of OpenEnv's client. Its server repeats texts, and ends the episode after `end`."""

    def __init__(self, base_url: str | None = None) -> None:
        assert base_url

    async def connect(self) -> GenericEnvClient:
        return self

    async def reset(self, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(observation={"text": f"seed {kwargs['seed']}", "metadata": {}}, reward=None, done=False)

    async def step(self, action: dict[str, Any], **kwargs: Any) -> SimpleNamespace:
        if set(action) != {"text"}:
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        text = action["text"]
        return SimpleNamespace(observation={"text": text}, reward=len(text) / 10, done=text == "end")

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


def test_turns_become_actions_and_observations_texts() -> None:
    for text, action in (
        ("hello", {"text": "hello"}),
        (" 12 ", {"text": "12"}),
        ('{"text": "a", "metadata": {}}', {"text": "a", "metadata": {}}),
        ('I say:\n```json\n{"text": "b"}\n```', {"text": "b"}),
    ):
        assert action_reader(SCHEMA)(text) == action
    number = {"type": "integer"}
    assert action_reader({"properties": {"row": number}})("3") == {"row": 3}
    with pytest.raises(ValueError, match="expected a JSON object with row, column"):
        action_reader({"properties": {"row": number, "column": number}, "required": ["row", "column"]})("3")
    assert observation_text({"text": "a", "reward": 1.0, "done": False, "metadata": {}}) == "a"
    assert observation_text({"text": "ä", "left": 2}) == '{"text": "ä", "left": 2}'


# Qwen's turns, without the rest of its template
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def untyped(a):  # type: ignore[no-untyped-def]
    """Has no types."""


def called(*calls: object) -> str:
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def test_a_reply_follows_the_end_of_the_turn_that_was_sampled() -> None:
    """Prompt, turn and reply are what the template writes for the whole conversation."""
    tokenizer = character_tokenizer(CHARACTERS, TOOLS_TEMPLATE)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "5"}]
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened + "call<|im_end|>" + reply_text(chat_of(tokenizer), messages[2:]) == whole


def test_prompts_show_the_schemas() -> None:
    schemas = tool_schemas(load_tools([f"{__name__}:add"]))
    chat = Example("", "5", (Message("user", "2+3"), Message("assistant", "5")), "row 0")
    (prompt,) = encode_prompts([with_tools(chat, schemas)], character_tokenizer(CHARACTERS, TOOLS_TEMPLATE))
    (shown_schema,) = json.loads(prompt.text.split("\n")[1].removesuffix("<|im_end|>"))
    assert shown_schema["function"]["name"] == "add"
    assert shown_schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first"}
    with pytest.raises(ConfigError, match=r"row 1 is a plain prompt, but only a chat template can show environment\.tools"):
        with_tools(Example("2+3", "5", source="row 1"), schemas)
    with pytest.raises(ConfigError, match=r"environment\.tools: untyped has no JSON schema: .*type hint"):
        check_environment(EnvironmentConfig(tools=(f"{__name__}:untyped",)))
