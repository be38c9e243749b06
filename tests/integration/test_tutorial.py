"""The notebook of docs/tutorial.md runs from its first cell to its last, on the CPU."""

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = {"python": shlex.quote(sys.executable), "dagrl": f"{shlex.quote(sys.executable)} -m dagrl.cli.main"}


def cells() -> list[str]:
    notebook = json.loads((DOCS / "tutorial.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_page_and_the_notebook_write_the_same_files() -> None:
    page = (DOCS / "tutorial.md").read_text()
    files = [cell.partition("\n") for cell in cells() if cell.startswith("%%writefile")]
    assert [first.split()[1] for first, _, _ in files] == ["make_dates.py", "make_model.py", "dates.py"]
    assert all(text in page for first, _, text in files if "make_model" not in first)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(DOCS.parent), str(tmp_path))))
    answer = None
    for cell in cells():
        answer = run(cell, tmp_path)
    assert answer == "2019-03-05"
    assert (tmp_path / "correct.html").stat().st_size > 100_000 and (tmp_path / "step_30" / "model.safetensors").is_file()
    imitates, corrected = (model["metrics"]["all"] for model in json.loads((tmp_path / "measured.json").read_text()))
    assert imitates["sampled/right_high"] < corrected["sampled/right_low"]


def run(cell: str, directory: Path) -> Any:
    """Executes a cell as Jupyter does, and returns the value of its last expression."""
    if cell.startswith("%%writefile"):
        first, _, text = cell.partition("\n")
        (directory / first.split()[1]).write_text(text)
        return None
    if cell.startswith("!"):
        for line in cell.replace("\\\n", " ").splitlines():
            program, _, arguments = line.removeprefix("!").partition(" ")
            command = f"{PROGRAMS.get(program, program)} {arguments}"
            subprocess.run(command, shell=True, check=True, cwd=directory)  # noqa: S602
        return None
    *before, last = ast.parse(cell).body or [ast.parse("None").body[0]]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(before, []), "<cell>", "exec"), names)  # noqa: S102
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)  # noqa: S307
