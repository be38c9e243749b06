"""The examples of an algorithm, a loss, an advantage and a phase of one's own; the notebook of docs/tutorial.md."""

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.cli.main import main
from dagrl.config.file import dump_config
from dagrl.examples import own_loss
from tests.integration.main_job import ROOT, steps_of
from tests.integration.test_async_grpo import ASYNC, configuration

OWN = {
    "loss_fn": {"name": "dagrl.examples.own_loss:soft_clip", "args": {"width": 0.5}},
    "advantage": {"name": "dagrl.examples.own_loss:rank"},
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_cluster")
def test_an_algorithm_trains_from_the_command_line(tmp_path: Path) -> None:
    config = configuration(tmp_path, "own", grpo={"max_num_steps": 8, "async_grpo": ASYNC})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert main(["train", str(path), "algorithm=dagrl.examples.own_algorithm:KlInReward"]) == 0
    steps = steps_of(config)
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == 8 and np.mean(rewards[-3:]) > np.mean(rewards[:2])  # sevens become more frequent
    assert {step["stage"] for step in steps} == {"KlInReward"}
    assert steps[0]["own/distance"] == pytest.approx(0.0, abs=1e-6) and abs(steps[-1]["own/distance"]) > 1e-3


def test_the_example_ranks_completions() -> None:
    rewards = np.array([[3.0, 1.0, 1.0, 9.0], [2.0, 2.0, 5.0, 0.0]])
    valid = np.array([[True] * 4, [True, True, False, True]])
    found = own_loss.rank(rewards, valid)
    np.testing.assert_allclose(found, [[1 / 3, -2 / 3, -2 / 3, 1.0], [0.5, 0.5, 0.0, -1.0]])


EXAMPLE = ROOT / "examples" / "embed_phase.py"


def test_the_embedding_example_finds_the_slope() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "slope 3.000"


def test_the_embedding_example_is_short() -> None:
    """What is its own: neither blank nor an import."""
    lines = [line for line in EXAMPLE.read_text().splitlines()[1:] if line.strip()]
    assert sum(not line.startswith(("import ", "from ")) for line in lines) <= 30


DOCS = ROOT / "docs"
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
        answer = run_cell(cell, tmp_path)
    assert answer == "2019-03-05"
    assert (tmp_path / "correct.html").stat().st_size > 100_000 and (tmp_path / "step_30" / "model.safetensors").is_file()
    imitates, corrected = (model["metrics"]["all"] for model in json.loads((tmp_path / "measured.json").read_text()))
    assert imitates["sampled/right_high"] < corrected["sampled/right_low"]


def run_cell(cell: str, directory: Path) -> Any:
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
