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
    names = ["GptOssForCausalLM", "NemotronHForCausalLM", "Qwen3ForCausalLM", "NoSuchModel"]
    code = "import sys; from dagrl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "refit", "--architectures", "--json", str(report), "--names", *names]
    subprocess.run(command, check=True, timeout=280)
    rows = {(row["architecture"], row["source"], row["tp"]): row for row in json.loads(report.read_text())}
    sources = [(name, source) for name in names[:3] for source in ("hf", "dtensor")] + [("Qwen3ForCausalLM", "megatron")]
    assert all(rows[*one, tp]["passed"] for one in sources for tp in (1, 2)), rows
    missing = rows["NoSuchModel", "hf", 1]
    assert not missing["passed"] and "no model of this name" in missing["reason"]
