"""`dagrl init`: its configurations load, its comments name keys that exist, its errors are one line."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from dagrl.cli.init import Answers, config_text, found_keys
from dagrl.cli.main import main
from dagrl.config.file import load_config

OWN = "tests.unit.cli.test_init:score"


def score(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    return [1.0] * len(prompts)


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that has one model and one dataset, and does not answer about others that are `away`."""
    known = {"Qwen/Qwen3-0.6B": True, "openai/gsm8k": True, "away/model": None}
    monkeypatch.setattr("dagrl.cli.init.hub_has", lambda name, kind: known.get(name, False))


@pytest.mark.parametrize("reward, algorithm", [("math", "grpo"), (OWN, "grpo"), ("", "sft")])
def test_what_it_writes_is_a_configuration(reward: str, algorithm: str, tmp_path: Path) -> None:
    data, file = tmp_path / "train.jsonl", tmp_path / "made.yaml"
    data.write_text('{"question": "1+1", "solution": "2"}\n')
    assert main(["init", "--model", "Qwen/Qwen3-0.6B", "--data", str(data), "--reward", reward, "-o", str(file)]) == 0
    config = load_config(file, [])
    assert (config.name, config.algorithm, config.policy.model_name) == ("made", algorithm, "Qwen/Qwen3-0.6B")
    assert (config.data.path, config.data.prompt_key, config.data.response_key) == (str(data), "question", "solution")
    if reward:
        assert config.reward.function == {"math": "dagrl.rl.rewards:math_answer"}.get(reward, reward)


@pytest.mark.parametrize("reward", ["my_task:reward", ""])
def test_every_key_in_a_comment_exists(reward: str, tmp_path: Path) -> None:
    text = config_text(Answers("m", "d.jsonl", reward), "made")
    lines = text.splitlines()[3:]
    uncommented = "\n".join(re.sub(r"^( *)# ( *)(?=\w+:)", r"\1\2", line) for line in lines)
    assert uncommented.count("#") < text.count("#") - 8
    (tmp_path / "all.yaml").write_text(uncommented)
    config = load_config(tmp_path / "all.yaml", [])
    assert config.logger.wandb_enabled and config.checkpointing.resume
    assert config.data.system_prompt == "Think step by step."


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "m", "--data", "d"], "standard input is not a terminal; pass --reward"),
        (["--model", "m", "--data", "", "--reward", ""], "a run needs data"),
        (["--model", "m", "--data", "d", "--reward", "maths"], "reward 'maths': expected math, exact, an import path"),
        (["--model", "m", "--data", "d", "--reward", "", "-o", "there.yaml"], "there.yaml exists already"),
        (["--model", "m", "--data", "there.yaml", "--reward", ""], "model: there is no 'm' (relative to "),
        (["--model", "no/model", "--data", "there.yaml", "--reward", ""], "model: there is no 'no/model'"),
        (["--model", ".", "--data", "no/data", "--reward", ""], "data: there is no 'no/data'"),
        (
            ["--model", ".", "--data", "data/no.jsonl", "--reward", ""],
            "expected: a JSONL file, a dataset on disk",
        ),
        (["--model", ".", "--data", "there.yaml", "--reward", "no_task:reward"], "reward: there is no module 'no_task'"),
    ],
)
def test_bad_answers_are_one_error(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    Path("there.yaml").touch()
    assert main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]


@pytest.mark.parametrize("line", ["", "[1]", "not JSON"])
def test_files_without_keys_have_the_defaults(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    assert found_keys(tmp_path / "a.jsonl") == ("prompt", "response") == found_keys(tmp_path / "none.jsonl")


def test_what_the_hub_does_not_answer_about_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "away/model", "--data", "openai/gsm8k", "--reward", "", "-o", str(tmp_path / "a.yaml")]
    assert main(["init", *arguments]) == 0
    assert "not checked, as the Hugging Face Hub does not answer: away/model\n" in capsys.readouterr().out
