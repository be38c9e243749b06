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
    """To Megatron modules of another layout, Megatron-Core's own resharding runs in the same way over the same tensors."""
    results = tmp_path / "refit.json"
    assert main(["bench", "refit", "--trial", "--rounds", "1", "--deadline", "300", "--json", str(results)]) == 0
    rows = json.loads(results.read_text())["cases"]
    found = {case.name: {row["method"] for row in rows if row["name"] == case.name} for case in TRIALS}
    for case in TRIALS:
        assert "dagrl" in found[case.name]
        assert ("megatron.core.resharding" in found[case.name]) == case.to_megatron
    assert not any(row["wrong_parameters"] for row in rows)
