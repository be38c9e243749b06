"""The wheel: its one top-level name, and a run from it in a directory whose own packages have the names of ours."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.integration.main_job import ROOT

UNIGRAM = Path(__file__).with_name("unigram_workers.py")
SOURCES = ("dagrl", "pyproject.toml", "README.md", "LICENSE")

REWARD = """
from pathlib import Path


def score(prompts, completions, references):
    with Path("reward_calls").open("a") as file:
        file.write(f"{len(prompts)}\\n")
    return [completion.count("1") / 4 for completion in completions]  # differs between samples of an untrained model
"""

WORKER = """
from pathlib import Path

from {module} import {base}


class CountingWorker({base}):
    def train_step(self, batch, loss):
        Path(f"train_step_{{self.context.rank}}").touch()
        return super().train_step(batch, loss)
"""

PHASE = """
from dagrl import Input, Shard, Value, phase
from dagrl.graphs.phases import SAMPLES


@phase(inputs=SAMPLES)
def my_step(train: Shard, batch: Input) -> Value:
    return train.reduce("merge_metrics", train.map("train_step", batch, loss="policy"))
"""

SHORT = (
    *("sft.max_num_steps=4", "sft.max_val_samples=32"),
    *("grpo.max_num_steps=2", "grpo.max_val_samples=32"),
    "policy.megatron_cfg.data_parallel_size=1",
)
OWN = (
    "reward.function=workers.reward:score",
    "policy.worker=workers.counting:CountingWorker",
    "phases.train_step=graphs.mine:my_step",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a wheel from a copy of this checkout, so that nothing of an earlier build gets in."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(ROOT / name, copy / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "-w", str(out), str(copy), cwd=out)
    (built,) = out.glob("dagrl-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment that has the wheel, and sees the packages of this one except for its dagrl."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # A path in a .pth file is searched, but .pth files in it are not read: an editable dagrl stays unseen.
    (folder / "lib" / version / "site-packages" / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps")
    _run(*pip, "--ignore-installed", str(wheel), cwd=folder)
    return folder / "bin"


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"dagrl", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dagrl").rglob("*.py")}
    assert modules - names == set()
    assert {f"dagrl/examples/{path.name}" for path in (ROOT / "examples").glob("*.yaml")} <= names
    assert "dagrl/examples/data/arithmetic.jsonl" in names and "dagrl/py.typed" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "base", "keys"),
    [
        ("workers.unigram", "UnigramTrainer", ("policy.generation.worker=workers.unigram:UnigramGenerator",)),
        ("dagrl.workers.megatron", "MegatronWorker", ()),
    ],
    ids=["own workers", "Megatron and vLLM"],
)
def test_the_quickstart_trains_from_the_wheel_with_the_users_own_packages(
    installed: Path, tmp_path: Path, module: str, base: str, keys: tuple[str, ...]
) -> None:
    """Their `workers` and `graphs` are imported by the driver, the actors and the reward's process, and ours still work."""
    workers = {"reward": REWARD, "counting": WORKER.format(module=module, base=base), "unigram": UNIGRAM.read_text()}
    files = {"workers": workers, "graphs": {"mine": PHASE}}
    for package, modules in files.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        for name, text in modules.items():
            (tmp_path / package / f"{name}.py").write_text(text)
    dagrl = str(installed / "dagrl")
    where = _run(str(installed / "python"), "-c", "import dagrl; print(dagrl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)

    assert "grpo_quickstart" in _run(dagrl, "examples", cwd=tmp_path)
    _run(dagrl, "examples", "grpo_quickstart", cwd=tmp_path)
    exported = base == "MegatronWorker"
    _run(dagrl, "train", "grpo_quickstart.yaml", *SHORT, *OWN, *keys, f"checkpointing.export_hf={exported}", cwd=tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "runs/grpo_quickstart/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert len(trained) == 6 and len({line["loss"] for line in trained}) > 4
    assert sum(map(int, (tmp_path / "reward_calls").read_text().split())) >= 2 * 128
    assert {path.name for path in tmp_path.glob("train_step_*")} == {"train_step_0"}
    assert bool(list((tmp_path / "runs/grpo_quickstart/final_model").glob("*.safetensors"))) == exported


def _run(*command: str, cwd: Path) -> str:
    """Returns the output of a command that sees nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
