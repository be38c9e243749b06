"""`dagrl export`: what it rejects before anything starts. `test_main_job` converts a checkpoint there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.cli.main import main

ADAPTERS = {
    "damaged": {"r": 8},
    "nowhere": {"base_model_name_or_path": "/nowhere/model", "target_modules": ["q_proj"], "r": 8, "lora_alpha": 16},
    "pattern": {"base_model_name_or_path": "run", "target_modules": "all-linear"},
}


@pytest.mark.parametrize(
    "source, message",
    [
        ("nothing", "nothing is neither a Hugging Face directory (no config.json) nor one of PEFT's"),
        ("/", "neither a Hugging Face directory"),
        ("run/checkpoints/step_00000001", "does not exist; expected the directory of a checkpoint"),
        ("damaged", "cannot read damaged/adapter_config.json: KeyError('base_model_name_or_path')"),
        ("nowhere", "policy.model_name: '/nowhere/model' is not a directory"),
        ("pattern", "target_modules 'all-linear'; expected"),
    ],
)
def test_what_is_no_model_is_an_error(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.yaml").touch()
    for name, content in ADAPTERS.items():
        Path(name).mkdir()
        Path(name, "adapter_config.json").write_text(json.dumps(content))
    assert main(["export", source, "-o", "out"]) == 2
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_an_existing_target_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "-o", str(tmp_path)]) == 2
    assert "exists already; remove it" in capsys.readouterr().err
