"""`dagrl bench settings` on the CPU: every comparison measures every setting, with equal losses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from dagrl.bench import settings


@pytest.mark.slow
@pytest.mark.parametrize("comparison", settings.COMPARISONS)
def test_every_setting_is_measured(comparison: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    file = tmp_path / "rows.json"
    sizes = ["--rows", "8", "--length", "64", "--median", "16", "--rounds", "1", "--turns", "2", "--json", str(file)]
    settings.run(parser.parse_args([comparison, *sizes]))
    rows = json.loads(file.read_text())["rows"]
    assert [row["setting"] for row in rows] == [one.name for one in settings.COMPARISONS[comparison]]
    for row in rows:
        assert row["rounds"] == 2 and row["tokens"] == rows[0]["tokens"] < 8 * 64
        parts = [name for name in row["ms"] if name != "step"]
        assert row["ms"]["step"] == pytest.approx(sum(row["ms"][name] for name in parts), rel=0.5)
        assert row["loss"] == pytest.approx(rows[0]["loss"], abs=1e-5)
    if comparison == "packing":
        assert rows[0]["padding_share"] > rows[2]["padding_share"]
