"""`dagrl evaluate`: what it rejects before anything starts. `test_main_job` evaluates a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.cli.main import main

GRPO, SFT = "examples/grpo_quickstart.yaml", "examples/sft_quickstart.yaml"
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([SFT], "add algorithm=grpo and reward.function="),
        ([GRPO, "--samples", "0", "--no-greedy"], "nothing to generate"),
        ([GRPO, "--samples", "4", "--k", "8"], "pass@8: expected a k of 1 to 4"),
        ([GRPO, "--checkpoint", "examples"], "--checkpoint examples is not a Hugging Face directory"),
        ([GRPO, "data.task=null", "data.path=examples/data/arithmetic.jsonl", "data.val_fraction=0"], "no held-out prompts"),
    ],
)
def test_bad_arguments_are_one_error(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["evaluate", *arguments, f"output_dir={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
