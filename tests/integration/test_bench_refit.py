"""The refit benchmark with tiny models on the CPU: every method of every trial runs and leaves every element right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.bench.refit_cases import TRIALS
from dagrl.cli.main import main

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_every_trial_by_every_method(tmp_path: Path) -> None:
    """To Megatron modules of another layout, Megatron-Core's own resharding runs in the same way over the same tensors.

    A parameter that is wrong after a turn would be an error of its side.
    """
    results = tmp_path / "refit.json"
    assert main(["bench", "refit", "--trial", "--repeats", "1", "--rounds", "2", "--json", str(results)]) == 0
    rows = json.loads(results.read_text())["rows"]
    for case in TRIALS:
        found = {row["side"]: row for row in rows if row["case"] == case.label}
        assert found["dagrl"]["rounds"] == 2 and found["dagrl"]["bytes_into_rank"] > 0
        assert ("megatron.core.resharding" in found) == case.to_megatron
        assert ("dagrl verify=checksum" in found) != case.to_megatron
