"""Bytes that Ray's variants and eager phases copy into shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.bench import copied

KIB = 1 << 10


@pytest.mark.parametrize(
    ("variant", "shape", "given", "returned", "expected"),
    [
        ("ray_flat_graph", "scatter-gather", 100, 200, 100 + 8 * 200),
        ("ray_flat_graph", "multiple args", 100, 200, 8 * 100 + 8 * 200),
        ("ray_flat_graph", "chain", 100, 200, 9 * 100),
        ("ray_calls", "scatter-gather", 200 * KIB, 100, 8 * 200 * KIB),
        ("ray_calls", "reduce", 100, 200 * KIB, 8 * 200 * KIB),
        ("ray_calls_put", "scatter-gather", 100, 100, 100),
        ("dagrl_eager", "scatter-gather", 100, 100, 0),
        ("dagrl_eager", "scatter-gather", 200 * KIB, 100, 200 * KIB),
        ("dagrl_eager", "multiple args", 200 * KIB, 100, 200 * KIB),
        ("dagrl_eager", "scatter-gather", 100, 200 * KIB, 8 * 200 * KIB),
        ("dagrl_eager", "chain", 200 * KIB, 100, 9 * 200 * KIB),
    ],
)
def test_copied_bytes_of_a_step(
    monkeypatch: pytest.MonkeyPatch, variant: str, shape: str, given: int, returned: int, expected: int
) -> None:
    monkeypatch.setattr(copied, "_serialized", len)
    value, result = np.zeros(given, np.uint8), np.zeros(returned, np.uint8)
    assert copied.computed(variant, shape, 8, value, result) == expected
