"""The bench over architectures: a refit that fails is a row with its reason, and does not end the bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_rows_of_architectures(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    report = tmp_path / "rows.json"
    names = ["GptOssForCausalLM", "Qwen3NextForCausalLM", "NoSuchModel"]
    code = "import sys; from dagrl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "refit_architectures", "--json", str(report), "--names", *names]
    subprocess.run(command, check=True, timeout=280)
    rows = {(row["architecture"], row["source"]): row for row in json.loads(report.read_text())}
    assert all(rows[name, source]["passed"] for name in names[:2] for source in ("hf", "dtensor")), rows
    assert not rows["NoSuchModel", "hf"]["passed"] and "no model of this name" in rows["NoSuchModel", "hf"]["reason"]
