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


@pytest.mark.parametrize("reward, algorithm", [("math", "grpo"), ("my_task:reward", "grpo"), ("", "sft")])
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
