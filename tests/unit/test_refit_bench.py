"""The refit benchmark ends with an error when a way failed or what arrived was wrong."""

from __future__ import annotations

import pytest

from bench.refit import check
from dagrl.errors import RunError

GOOD = {"name": "4B TP2->TP2", "dtype": "bf16", "method": "dagrl", "median_s": 0.01, "wrong_parameters": 0}


def test_good_rows_pass() -> None:
    check([GOOD, {"name": "4B TP2->TP2", "dtype": "bf16", "note": "built in 1 s"}])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**GOOD, "wrong_parameters": 3}, r"1 ways .* failed, see their rows: 4B TP2->TP2 bf16 dagrl"),
        ({"name": "30B", "dtype": "fp8", "method": "prepare", "error": "rank 1: out of memory"}, "30B fp8 prepare"),
        ({"error": "2 ranks died"}, "2 ranks died"),
    ],
)
def test_bad_rows_are_an_error(row: dict[str, object], words: str) -> None:
    with pytest.raises(RunError, match=words):
        check([GOOD, row])
