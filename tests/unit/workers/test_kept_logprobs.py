"""Columns that a worker keeps: found by row id in any order and width, never those of another step, none missing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from dagrl.errors import RunError
from dagrl.runtime.shapes import Batch
from dagrl.workers.train.kept_logprobs import KeptLogprobs

LENGTHS = (3, 5, 1, 4)


def batch_of(ids: list[int], width: int, step: int = 1) -> Batch:
    """Rows with the length of their id; the last row is padding."""
    lengths = np.array([LENGTHS[row_id] for row_id in ids] + [0])
    fields = {"row_ids": np.array([*ids, 0]), "lengths": lengths, "loss_mask": mask_of(ids, width)}
    return Batch(fields, {"step": step})


def mask_of(ids: list[int], width: int) -> npt.NDArray[np.float32]:
    """Returns the mask of every token of a row but the first."""
    lengths = np.array([LENGTHS[row_id] for row_id in ids] + [0])
    tokens = np.arange(width)[None, :]
    return ((tokens < lengths[:, None]) & (tokens > 0)).astype(np.float32)


def values_of(ids: list[int], width: int) -> npt.NDArray[np.float32]:
    """Returns 10 i + t + 1 for token t of row i."""
    return (10 * np.array([*ids, 9])[:, None] + np.arange(width)[None, :] + 1).astype(np.float32)


@given(order=st.permutations(range(4)), split=st.integers(0, 4), width=st.integers(5, 8), other=st.integers(5, 8))
def test_rows_are_found_by_their_id(order: list[int], split: int, width: int, other: int) -> None:
    kept = KeptLogprobs()
    for ids in (order[:split], order[split:]):
        kept.keep(batch_of(ids, width), prev_logprobs=values_of(ids, width), entropy=-values_of(ids, width))
    joined = kept.join(batch_of([0, 1, 2, 3], other), ["prev_logprobs"])
    mask = mask_of([0, 1, 2, 3], other)
    np.testing.assert_array_equal(joined["prev_logprobs"], values_of([0, 1, 2, 3], other) * mask)
    np.testing.assert_array_equal(joined["entropy"] * mask, -values_of([0, 1, 2, 3], other) * mask)
    unknown = kept.join(batch_of([0, 1, 2, 3], other), ["reference_logprobs"], required=False)
    assert not unknown["reference_logprobs"].any(), "no phase computed them"
    assert "row_ids" not in joined.fields


def test_rows_that_are_not_held_are_an_error() -> None:
    """As another shard computed them, or they are of another step, whose rows are forgotten."""
    kept = KeptLogprobs()
    kept.keep(batch_of([0, 2], 5), prev_logprobs=values_of([0, 2], 5))
    with pytest.raises(RunError, match="on 1 rows whose prev_logprobs this worker does not hold, the first with row_id 1"):
        kept.join(batch_of([0, 1], 5), ["prev_logprobs"])
    kept.keep(batch_of([0, 1], 5), prev_logprobs=values_of([0, 1], 5))
    with pytest.raises(RunError, match=r"step 2 trains on 2 rows whose prev_logprobs .* the first with row_id 0"):
        kept.join(batch_of([0, 1], 5, step=2), ["prev_logprobs"])
    with pytest.raises(RunError, match="step 1 trains"):
        kept.join(batch_of([0, 1], 5), ["prev_logprobs"])


def test_a_batch_without_row_ids_is_left_alone() -> None:
    batch = Batch({"lengths": np.array([2]), "loss_mask": np.ones((1, 2), np.float32)})
    assert KeptLogprobs().join(batch, ["prev_logprobs"]) is batch
