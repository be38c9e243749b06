"""verifiers 0.4 as an agent: the task of docs/agents.md, and its own environment of TextArena (make test-agents).

Its programs are real processes with packages that uv installs. The policy is a script.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dagrl.rl.agents import Endpoint
from tests.integration.rl.test_agent_packages import served
from tests.unit.rl.test_agent_endpoint import END, Served

__all__ = ["served"]  # a fixture

pytest.importorskip("verifiers", minversion="0.4")
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
PROGRAM_S = 300  # the first program waits for uv


def documented() -> Any:
    """Returns what the example of docs/agents.md defines."""
    section = (ROOT / "docs" / "agents.md").read_text().partition("## With verifiers 0.4\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    actual: dict[str, Any] = {"__name__": "documented"}
    exec(compile(code, "docs/agents.md", "exec"), actual)  # noqa: S102
    return actual


def endpoint(served: Served) -> Endpoint:
    return Endpoint(served.server.base_url, served.episode.api_key, "policy")


def turns(served: Served) -> tuple[list[str], str]:
    """Returns the turns in the loss of the only conversation, and the text of its context."""
    (row,) = served.rows()
    decode = served.tokenizer.decode
    learned = decode([token for token, in_loss in zip(row.tokens, row.sampled, strict=True) if in_loss])
    context = decode([token for token, in_loss in zip(row.tokens, row.sampled, strict=True) if not in_loss])
    return learned.split(END)[:-1], decode(row.prompt) + context


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the word lists that TextArena downloads from NLTK, with one word."""
    directory = tmp_path / "corpora" / "words"
    directory.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (directory / name).write_text("noon\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))


@pytest.mark.timeout(PROGRAM_S)
@pytest.mark.parametrize(("said", "reward"), [("It is 5.", 1.0), ("It is 6.", 0.0)])
def test_the_documented_task(served: Served, said: str, reward: float) -> None:
    served.generation.texts.append(said)
    example = {"prompt": "2+3", "messages": [{"role": "user", "content": "2+3"}], "reference": "5", "seed": 1}
    assert asyncio.run(documented()["solve"](example, endpoint(served))) == reward
    assert turns(served)[0] == [said] and "2+3" in turns(served)[1]


@pytest.mark.timeout(PROGRAM_S)
def test_a_game_of_several_turns(served: Served, words: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers each guess; a reward of 1 is its own for the whole word."""
    import verifiers.v1 as vf
    from verifiers.v1.harnesses.null import NullHarnessConfig
    from verifiers.v1.tasksets.textarena import TextArenaConfig, TextArenaEnv, TextArenaEnvConfig

    monkeypatch.setenv("KEY", served.episode.api_key)
    client = vf.EvalClientConfig(base_url=served.server.base_url, api_key_var="KEY")
    player = vf.AgentConfig(harness=NullHarnessConfig(id="null"), runtime=vf.SubprocessConfig())
    taskset = TextArenaConfig(id="textarena", game="Hangman-v0")

    async def play() -> Any:
        environment = TextArenaEnv(TextArenaEnvConfig(taskset=taskset, player=player))
        async with environment.serving():
            return await environment.run_episode(next(iter(environment.taskset.load())), vf.ModelContext("policy", client))

    guesses = ["A first letter: [N]", "[X]", "The word is [NOON]"]
    served.generation.texts += guesses
    episode = asyncio.run(play())
    assert episode.ok, episode.errors
    (trace,) = episode.traces
    assert trace.reward == 1.0
    said, context = turns(served)
    assert said == guesses and "You are playing Hangman" in context and "  N   _   _   N" in context
