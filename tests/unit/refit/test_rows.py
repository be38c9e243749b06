"""The tables of the copy and checksum kernels, evaluated on the CPU: what torch copies, and the sums of contiguous bytes."""

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dagrl.refit.carry.verify import _COLUMNS, _UPPER, _WEIGHT, checksum, contiguous_bytes
from dagrl.refit.kernels.rows import WORD, ChecksumEntry, SummedView, as_rows, entries, in_rows

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


@pytest.mark.parametrize("other", [torch.ones(6, 4).t(), torch.ones(4, 6, dtype=torch.float16)], ids=["transposed", "cast"])
def test_other_copies_are_left_to_torch(other: Tensor) -> None:
    assert not run(torch.zeros(4, 6), other) and not run(other, torch.zeros(4, 6))


MASK = (1 << 64) - 1


def sums_of(table: Sequence[ChecksumEntry], moves: int) -> Tensor:
    """Returns `[moves, 2]`, computed like `_add_sums`, unit by unit."""
    found = [[0, 0] for _ in range(moves)]
    for address, units, total, stride, width, offset, owner in table:
        assert not address % width and not stride % width, "a GPU reads words at multiples of their size alone"
        for unit in range(total):
            row, column = divmod(unit, units)
            raw = ctypes.string_at(address + row * stride + column * width, width)
            place = offset + unit * width
            word, value = place // WORD, int.from_bytes(raw, "little") << (8 * (place % WORD))
            value -= (value >> 63) << 64  # as an int64
            weight = 2 * (word // _COLUMNS) + 1 + (2 * (word % _COLUMNS) + 1) * _WEIGHT
            found[owner][0] += value
            found[owner][1] += (value + _UPPER * (value >> 32)) * weight
    return torch.from_numpy(np.array([[one & MASK for one in pair] for pair in found], np.uint64).view(np.int64))


def assert_same_sums(moves: Sequence[Sequence[SummedView]]) -> None:
    expected = torch.stack([checksum(contiguous_bytes(pieces)) for pieces in moves])
    placed = [[(at, view if in_rows(view) else view.contiguous()) for at, view in pieces] for pieces in moves]
    assert torch.equal(sums_of(entries(placed), len(moves)), expected)


def random(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_parts_of_tensors_have_the_sums_of_their_bytes(data: st.DataObject) -> None:
    """Any box of a tensor of up to three dimensions, at any address; several moves, with gaps between their views."""
    moves: list[list[SummedView]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        pieces: list[SummedView] = []
        offset = 0
        for _ in range(data.draw(st.integers(1, 3))):
            dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
            shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
            starts = [data.draw(st.integers(0, size - 1)) for size in shape]
            stops = [data.draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
            view = random(*shape, dtype=dtype)[tuple(map(slice, starts, stops))]
            pieces.append((offset, view))
            offset += view.nbytes + data.draw(st.sampled_from([0, 0, 3, 16]))
        moves.append(pieces)
    assert_same_sums(moves)


@pytest.mark.parametrize("size", [1, 7, 8, 8 * _COLUMNS, 8 * _COLUMNS + 3, 24 * _COLUMNS + 8 * 5])
def test_rows_of_columns_and_their_remainder(size: int) -> None:
    assert_same_sums([[(0, random(size))]])


def test_rows_are_read_in_words_and_only_the_end_in_bytes() -> None:
    weight = random(64, 96, dtype=torch.bfloat16)
    assert [entry[1:6] for entry in entries([[(0, weight[:, 32:64])]])] == [(8, 8 * 64, 192, WORD, 0)]
    assert [entry[4:] for entry in entries([[(0, weight.flatten()[:35])]])] == [(WORD, 0, 0), (1, 64, 0)]
    assert_same_sums([[(0, weight[:, 32:64])], [(0, weight[3:5, 1:36])]])


def test_a_transposed_view_has_no_rows() -> None:
    assert not in_rows(random(8, 8).t())
