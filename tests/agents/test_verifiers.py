"""verifiers' own environments as environments of a run: its ReasoningGymEnv, ToolEnv and MultiTurnEnv (make test-agents)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagrl.config import DataConfig, EnvironmentConfig
from dagrl.data import load_splits
from dagrl.data.tokenization import Prompt, encode_prompts
from dagrl.errors import ConfigError
from dagrl.rl.environments import FAILED, EnvironmentRunner, Question, Reply, check_environment
from dagrl.run.model import character_tokenizer

vf = pytest.importorskip("verifiers")

ENVIRONMENT = "dagrl.rl.adapters.verifiers:VerifiersEnvironment"
EXAMPLES = "dagrl.rl.adapters.verifiers:examples"
MADE = '''
import verifiers as vf
from datasets import Dataset


def arithmetic():
    """verifiers' wrapper of reasoning-gym."""
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

    return ReasoningGymEnv("basic_arithmetic", num_train_examples=6, num_eval_examples=2, seed=3)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def right(completion, answer, **kwargs) -> float:
    return float(answer in completion[-1].content)


def tools():
    rows = Dataset.from_list([{"question": "3+4?", "answer": "7"}, {"question": "1+1?", "answer": "2"}])
    return vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 3
        state["prompt"] = [*state["prompt"], vf.types.UserMessage(content=f"{state['left']} tries")]
        return state

    async def env_response(self, messages, state, **kwargs):
        state["left"] -= 1
        if state["left"] == 1 and messages[-1].content == "rewrite":
            raise vf.Error("told to fail")
        return [vf.types.UserMessage(content=f"{state['left']} left")]

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["answer"] in state["trajectory"][-1]["completion"][-1].content

    @vf.cleanup
    async def note(self, state):
        if path := state["info"].get("notes"):
            with open(path, "a") as file:
                file.write(f"cleaned up after {len(state['trajectory'])} turns\\n")


def turns(state, **kwargs) -> float:
    return 1 / len(state["trajectory"])


def guess(notes=""):
    rows = Dataset.from_list([{"question": f"guess {n}", "answer": str(n), "info": {"notes": notes}} for n in range(8)])
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[right, turns], weights=[1.0, 0.5]), max_turns=5)


def compared():
    def best(completions, **kwargs) -> list[float]:
        return [1.0] * len(completions)

    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "1", "answer": "1"}]), rubric=vf.Rubric(funcs=[best]))
'''
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n", TEMPLATE)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"made_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MADE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


class Conversation:
    """The episode of an example, with all turns so far."""

    def __init__(self, runner: EnvironmentRunner, prompt: Prompt) -> None:
        self._runner, self._turns, self.prompt = runner, list[str](), prompt

    def begin(self) -> Reply:
        """What the environment gives before the first turn."""
        return self._ask()

    def say(self, text: str) -> Reply:
        """The answer to a turn of the policy."""
        self._turns.append(text)
        return self._ask()

    def _ask(self) -> Reply:
        question = Question(self.prompt.source, self.prompt, 7, list(self._turns))
        return self._runner.submit(0, [question]).result()[0]


@contextmanager
def conversations(name: str, held_out: int = 1, **args: Any) -> Iterator[list[Conversation]]:
    named = {"name": name, "args": args}
    splits = load_splits(DataConfig(task=EXAMPLES, task_args={**named, "held_out": held_out}))
    config = EnvironmentConfig(function=ENVIRONMENT, args=named, max_turns=8)
    check_environment(config)
    with EnvironmentRunner(config, TOKENIZER) as runner:
        yield [Conversation(runner, prompt) for prompt in encode_prompts(splits.train, TOKENIZER)]


def test_a_single_turn_has_the_rubrics_reward(module: str) -> None:
    """Of reasoning-gym: the answers come from its own data set, not from the adapter."""
    import reasoning_gym

    problems = list(reasoning_gym.create_dataset("basic_arithmetic", size=8, seed=3))
    with conversations(f"{module}:arithmetic") as found:
        assert len(found) == 6, "the environment has evaluation rows of its own"
        for problem, conversation in zip(problems, found[:3], strict=False):
            assert problem["question"] in conversation.prompt.text and conversation.prompt.text.startswith("<system>")
            opening = conversation.begin().prompt
            assert opening is not None and opening.text == conversation.prompt.text, "its own prompt, rendered again"
            assert conversation.say(f"<answer>{problem['answer']}</answer>") == Reply(None, reward=1.0)
        wrong = found[3]
        wrong.begin()
        assert wrong.say("<answer>none</answer>").reward != 1.0


def test_tools_are_called_as_the_environment_calls_them(module: str) -> None:
    pytest.importorskip("vllm")
    with conversations(f"{module}:tools") as found:
        (conversation,) = found
        assert '"name": "add"' in conversation.prompt.text, "the chat template shows its tools"
        conversation.begin()
        reply = conversation.say('<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>')
        assert reply.text is not None and reply.text.endswith("<tool>7<eos><assistant>") and reply.reward is None
        assert conversation.say("It is 7.") == Reply(None, reward=1.0)


def test_several_turns_keep_the_state_of_their_rollout(module: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with conversations(f"{module}:guess", held_out=2, notes=str(notes)) as found:
        one, other = found[3], found[5]
        opening = one.begin().prompt
        assert opening is not None and opening.text == "<user>guess 3<eos><user>3 tries<eos><assistant>", "from setup_state"
        assert one.say("1").text == "<user>2 left<eos><assistant>"
        other.begin()
        assert other.say("4").text == "<user>2 left<eos><assistant>", "each has its own state"
        assert one.say("2").text == "<user>1 left<eos><assistant>"
        assert one.say("3") == Reply(None, reward=1 + 0.5 / 3), "the rubric's weighted sum"
        failed = found[0]
        failed.begin()
        failed.say("rewrite")
        reply = failed.say("rewrite")
        assert reply.reason == FAILED and "told to fail" in reply.failure
    assert sorted(notes.read_text().splitlines()) == [f"cleaned up after {turns} turns" for turns in (1, 2, 3)], (
        "also after an episode that was closed early, and one that failed"
    )


@pytest.mark.parametrize(
    "name, message",
    [
        ("{module}:compared", "compares rollouts of a group"),
        ("no_such_environment", "verifiers cannot load the environment 'no_such_environment'"),
        ("{module}:nothing", "has no 'nothing'"),
    ],
)
def test_what_cannot_run_is_found_with_the_data(name: str, message: str, module: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_splits(DataConfig(task=EXAMPLES, task_args={"name": name.format(module=module)}))


def test_the_last_rows_are_held_out(module: str) -> None:
    splits = load_splits(DataConfig(task=EXAMPLES, task_args={"name": f"{module}:guess", "held_out": 3}))
    shown: Sequence[str] = [example.response for example in (*splits.train, *splits.validation)]
    assert list(shown) == list("01234567") and len(splits.validation) == 3
