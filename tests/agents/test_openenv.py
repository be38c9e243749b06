"""OpenEnv's own echo environment, created by `openenv init` and served by uvicorn (make test-agents)."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagrl.config import DataConfig, EnvironmentConfig
from dagrl.data import load_splits
from dagrl.data.tokenization import Prompt, encode_prompts
from dagrl.errors import RunError
from dagrl.rl.environments import EnvironmentRunner, Question, Reply
from dagrl.run.model import character_tokenizer
from tests.unit.rl.test_environment import GenericEnvClient

pytest.importorskip("openenv")

ENVIRONMENT = "dagrl.rl.openenv:OpenEnvironment"
TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
OWN = """
def observe(observation):
    return f"heard {observation['message_length']}: "


def act(text):
    return {"message": text.upper()}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts a server of the environment and returns its address."""
    directory = tmp_path_factory.mktemp("openenv")
    openenv = Path(sys.executable).with_name("openenv")
    made = subprocess.run([openenv, "init", "echoes"], cwd=directory, capture_output=True, text=True, check=False)
    app = directory / "echoes" / "server" / "app.py"
    assert app.is_file(), made.stdout + made.stderr
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=4"))  # as the file advises
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "echoes.server.app:app", "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command, cwd=directory, env={**os.environ, "PYTHONPATH": str(directory)}) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.2)


def prompts() -> list[Prompt]:
    splits = load_splits(DataConfig(task="dagrl.rl.openenv:episodes", task_args={"count": 3, "held_out": 1, "seed": 5}))
    assert [example.columns["reset"] for example in splits.validation] == [{"seed": 8}]
    return encode_prompts(splits.train, TOKENIZER)


def ask(runner: EnvironmentRunner, prompt: Prompt, *turns: str) -> Reply:
    return runner.submit(0, [Question(prompt.source, prompt, 7, list(turns))]).result()[0]


def test_an_episode_is_a_session_of_the_server(server: str) -> None:
    with EnvironmentRunner(EnvironmentConfig(function=ENVIRONMENT, args={"url": server}), TOKENIZER) as runner:
        one, other, _ = prompts()
        opening = ask(runner, one).prompt
        assert (
            opening is not None
            and "ready" in opening.text
            and opening.tokens.tolist() == TOKENIZER(opening.text)["input_ids"]
        )
        said = ask(runner, one, "hello")
        assert (
            isinstance(said.content, str)
            and '"echoed_message": "hello"' in said.content
            and said.reward == pytest.approx(0.5)
        )
        assert ask(runner, other).prompt is not None
        said = ask(runner, other, '```json\n{"message": "hi"}\n```')
        assert (
            isinstance(said.content, str) and '"echoed_message": "hi"' in said.content and said.reward == pytest.approx(0.2)
        )
        said = ask(runner, one, "hello", '{"words": "hello"}')
        assert isinstance(said.content, str) and said.content.startswith("error: ") and said.reward is None, (
            "the policy may try again"
        )
        assert ask(runner, one, "hello", '{"words": "hello"}', "again").reward == pytest.approx(0.5)


def test_own_functions_observe_and_act(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_echoes.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    args = {"url": server, "observe": "own_echoes:observe", "act": "own_echoes:act"}
    with EnvironmentRunner(EnvironmentConfig(function=ENVIRONMENT, args=args), TOKENIZER) as runner:  # type: ignore[arg-type]
        prompt, *_ = prompts()
        opening = ask(runner, prompt).prompt
        assert opening is not None and opening.text == "heard 0: "
        assert ask(runner, prompt, "hello") == Reply("heard 5: ", reward=0.5)


def test_the_double_has_the_signatures_of_the_client() -> None:
    from openenv.core.generic_client import GenericEnvClient as Real

    for name in ("reset", "step"):
        parameters = [list(inspect.signature(getattr(client, name)).parameters) for client in (Real, GenericEnvClient)]
        assert parameters[0] == parameters[1]


def test_an_unreachable_server_ends_the_run() -> None:
    runner = EnvironmentRunner(EnvironmentConfig(function=ENVIRONMENT, args={"url": "http://127.0.0.1:9"}), TOKENIZER)
    with runner, pytest.raises(RunError, match="does not answer with the schema of an OpenEnv server"):
        ask(runner, prompts()[0])
