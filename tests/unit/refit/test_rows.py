"""The table of the copy kernel, evaluated on the CPU: what torch copies."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dagrl.refit.kernels.rows import as_rows

Shape = tuple[int, ...]


def run(target: Tensor, source: Tensor) -> bool:
    """Copies like the kernel. Returns False if the copy is left to torch."""
    rows = as_rows(target, source)
    for one in rows or ():
        for row in range(one.count):
            ctypes.memmove(one.target + row * one.target_stride, one.source + row * one.source_stride, one.nbytes)
    return rows is not None


@st.composite
def views(draw: st.DrawFn, shape: Shape) -> tuple[Tensor, Tensor]:
    """A tensor and a view of `shape` in it, sometimes with two dimensions swapped."""
    outer = [draw(st.integers(size, size + 2)) for size in shape]
    starts = [draw(st.integers(0, around - size)) for around, size in zip(outer, shape, strict=True)]
    dims = draw(st.permutations(range(len(shape)))) if draw(st.integers(0, 4)) == 0 else list(range(len(shape)))
    held = torch.zeros([outer[dim] for dim in dims], dtype=torch.bfloat16)
    whole = held.permute([dims.index(dim) for dim in range(len(shape))])
    return held, whole[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_copy_what_torch_copies(data: st.DataObject) -> None:
    """For any two views of one shape; nothing else is written."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    (held, target), (values, source) = (data.draw(views(shape)) for _ in range(2))
    values.copy_(torch.arange(1, values.numel() + 1).view(values.shape))
    expected = source.clone()
    if run(target, source):
        assert torch.equal(target, expected)
        assert held.count_nonzero() == expected.numel()
    else:
        assert shape and max(shape) > 1, "a single element is a row"


def test_whole_rows_merge_and_columns_do_not() -> None:
    target, source = torch.zeros(6, 10), torch.ones(8, 10)
    (one,) = as_rows(target[1:5], source[2:6]) or ()
    assert (one.count, one.nbytes) == (1, 4 * 40)
    (padded,) = as_rows(torch.zeros(2, 3, 6)[..., :5], torch.ones(2, 3, 7)[..., :5]) or ()
    assert (padded.count, padded.nbytes, padded.target_stride, padded.source_stride) == (6, 20, 24, 28)
    (cut,) = as_rows(target[:, 2:5], source[2:, :3]) or ()
    assert (cut.count, cut.nbytes, cut.target_stride, cut.source_stride) == (6, 12, 40, 40)


@pytest.mark.parametrize("other", [torch.ones(6, 4).t(), torch.ones(4, 6, dtype=torch.bfloat16)], ids=["transposed", "cast"])
def test_other_copies_are_left_to_torch(other: Tensor) -> None:
    assert not run(torch.zeros(4, 6), other) and not run(other, torch.zeros(4, 6))
