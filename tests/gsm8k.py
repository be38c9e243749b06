"""Where the tests find GSM8K: where `DAGRL_GSM8K` says, or in `shared/data` next to the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GSM8K = Path(os.environ.get("DAGRL_GSM8K", Path(__file__).parents[2] / "shared" / "data" / "gsm8k"))

needs_gsm8k = pytest.mark.skipif(not (GSM8K / "test.jsonl").exists(), reason=f"no GSM8K at {GSM8K}; set DAGRL_GSM8K")
