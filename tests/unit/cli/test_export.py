"""`dagrl export`: what it rejects before anything starts. `test_main_job` exports a checkpoint."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from dagrl.cli.main import main
from dagrl.config.file import dump_config, load_config

EXAMPLE = Path(__file__).parents[3] / "examples/sft_quickstart.yaml"


@pytest.mark.parametrize(
    "source, message",
    [
        ("nothing", "nothing is not a checkpoint in a run's directory"),
        ("/", "/ is not a checkpoint"),
        ("run/checkpoints/step_00000001", "does not exist; expected the directory of a checkpoint"),
    ],
)
def test_export_rejects_a_source_that_is_no_checkpoint(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.yaml").touch()
    assert main(["export", source, "-o", "out"]) == 2
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_an_existing_target_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "-o", str(tmp_path)]) == 2
    assert "exists already; remove it" in capsys.readouterr().err


def test_a_worker_that_cannot_export_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dagrl.run.export.load_checkpoint_directory", MagicMock())
    config = load_config(EXAMPLE, ["policy.worker=tests.integration.unigram_workers:UnigramTrainer"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert main(["export", str(tmp_path / "checkpoints/step_00000001"), "-o", str(tmp_path / "model")]) == 2
    assert "it has no method export_hf; expected export_hf(directory: str)" in capsys.readouterr().err
