"""Which GPUs a process may use, and what `dagrl doctor` says of packages that do not fit."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bench.gpus import visible
from dagrl.doctor import MEGATRON, _bad_combinations, _cupy
from dagrl.machine import visible_gpus

TABLE = "".join(f"GPU-{letter * 4}, NVIDIA H200, 143771, 580.1\n" for letter in "abcd")


@pytest.mark.parametrize(
    ("variable", "letters"),
    [
        (None, "abcd"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("2,0", "ca"),
        ("1,-1,2", "b"),
        ("0,9,1", "a"),
        (" 3 ", "d"),
        ("GPU-cc,1", "cb"),
    ],
)
def test_visible_devices_as_cuda_reads_them(variable: str | None, letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [gpu.uuid for gpu in visible(TABLE)] == [f"GPU-{letter * 4}" for letter in letters]
    assert len(visible_gpus("0123")) == len(letters)


@pytest.mark.parametrize(
    ("versions", "advice"),
    [
        ({"cupy-cuda13x": "14.2"}, None),
        ({"cupy-cuda12x": "14.2"}, "cupy-cuda13x"),
        ({"cupy-cuda12x": "14.2", "cupy-cuda13x": "14.2"}, "install one"),
        ({}, None),
    ],
)
def test_doctor_knows_a_cupy_of_another_cuda(versions: dict[str, str], advice: str | None) -> None:
    findings = list(_cupy("13.0", versions))
    assert (findings[0].advice if findings else None) is None if advice is None else advice in findings[0].advice


def test_doctor_knows_the_megatron_that_is_pinned() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["megatron"] == [f"megatron-core=={MEGATRON}"]
    (finding,) = _bad_combinations({"megatron-core": "0.17.0"})
    assert MEGATRON in finding.advice
    assert not list(_bad_combinations({"megatron-core": MEGATRON}))
