"""`dagrl examples` lists and copies the examples, which then work from any directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.cli.main import main
from dagrl.config.file import load_config

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_all_examples_are_listed_with_a_sentence_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(listed) == [*CONFIGS, *PROGRAMS]
    assert listed["grpo_quickstart"].startswith("A tiny Qwen3 learns additions")


@pytest.mark.parametrize("name", [*CONFIGS, *PROGRAMS])
def test_a_copy_is_equal_to_the_example(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", name, "-o", str(tmp_path / "new")]) == 0
    copies = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert copies[0].stem == name
    for copy in copies:
        assert copy.read_bytes() == (ROOT / "examples" / copy.relative_to(tmp_path / "new")).read_bytes()


def test_a_copy_finds_its_data_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["examples", "sft_quickstart.yaml", "-o", str(tmp_path)]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = load_config("../sft_quickstart.yaml").data.path
    assert path is not None and Path(path).samefile(tmp_path / "data" / "arithmetic.jsonl")


def test_a_program_is_copied_with_the_data_of_its_command(tmp_path: Path) -> None:
    assert main(["examples", "kto", "-o", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.rglob("*.*")} == {"kto.py", "judged.jsonl"}


def test_existing_files_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "arithmetic.jsonl").write_text("mine")
    assert main(["examples", "sft_quickstart"]) == 2
    assert "data/arithmetic.jsonl: exists already" in capsys.readouterr().err
    assert (tmp_path / "data" / "arithmetic.jsonl").read_text() == "mine"
    assert not (tmp_path / "sft_quickstart.yaml").exists()


def test_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "grpo_quickstrat"]) == 2
    assert "no example 'grpo_quickstrat'; did you mean 'grpo_quickstart'" in capsys.readouterr().err


@pytest.mark.parametrize("name, needs", [("grpo_agent", "openai"), ("grpo_images", "PIL")])
def test_an_example_passes_all_checks_before_a_run(name: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    assert main(["train", str(ROOT / "examples" / f"{name}.yaml"), f"output_dir={tmp_path}", "--dry-run"]) == 0
