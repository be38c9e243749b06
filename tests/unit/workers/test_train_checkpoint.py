"""Pieces of tensors are written and read at any division of them, with checksums; one group of a single process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from dagrl.errors import CheckpointError
from dagrl.files import fingerprint
from dagrl.workers.train.checkpoint import Piece, Saving, disk_error, load, range_boxes, save, whole
from tests.unit.run.full_disk import full_disk

WEIGHT = torch.arange(60.0).view(6, 10)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def rows(tensor: torch.Tensor, *sizes: int) -> list[Piece]:
    starts = np.cumsum([0, *sizes[:-1]])
    return [
        Piece("w", part, (int(start), 0), tuple(tensor.shape))
        for start, part in zip(starts, tensor.split(list(sizes)), strict=True)
    ]


@given(st.data())
def test_boxes_of_a_range_are_its_elements_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, numbers.size)] * 2)))
    boxes = list(range_boxes(shape, start, stop))
    parts = [numbers[tuple(slice(low, low + n) for low, n in zip(*box, strict=True))].ravel() for box in boxes]
    assert [number for part in parts for number in part.tolist()] == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("background", [False, True])
def test_pieces_are_read_at_another_division(group: dist.ProcessGroup, tmp_path: Path, background: bool) -> None:
    saving = Saving(str(tmp_path), [*rows(WEIGHT, 1, 5), whole("random", torch.arange(9))], group, background=background)
    files = saving.finish(60)
    assert saving.is_written and {path.name for path in tmp_path.iterdir()} == {".metadata", *files}
    assert files == {name: fingerprint(tmp_path / name) for name in files} and len(files) == 2
    found, columns = torch.zeros(6, 10), torch.zeros(6, 3)
    load(tmp_path, [*rows(found, 4, 2)], group)
    assert torch.equal(found, WEIGHT)
    load(tmp_path, [Piece("w", columns, (0, 5), (6, 10))], group)
    assert torch.equal(columns, WEIGHT[:, 5:8])


def test_padding_is_loaded_as_zeros_and_cut(group: dist.ProcessGroup, tmp_path: Path) -> None:
    save(tmp_path, rows(WEIGHT, 6), group)
    more, less = torch.full((8, 10), 7.0), torch.empty(4, 10)
    load(tmp_path, [Piece("w", more, (0, 0), (8, 10), padded=True)], group)
    load(tmp_path, [Piece("w", less, (0, 0), (4, 10), padded=True)], group)
    assert torch.equal(more[:6], WEIGHT) and not more[6:].any() and torch.equal(less, WEIGHT[:4])


def test_missing_tensors_are_an_error_and_change_nothing(group: dist.ProcessGroup, tmp_path: Path) -> None:
    save(tmp_path, rows(WEIGHT, 6), group)
    mine = torch.full((8, 10), 7.0)
    with pytest.raises(CheckpointError, match=r"w has shape \(6, 10\) in it, expected \(8, 10\)"):
        load(tmp_path, rows(mine, 8), group)
    with pytest.raises(CheckpointError, match="it has no v"):
        load(tmp_path, [whole("v", mine)], group)
    assert (mine == 7).all()


def test_an_element_with_two_owners_is_not_saved(group: dist.ProcessGroup, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w has overlapping chunks"):
        save(tmp_path, [*rows(WEIGHT, 1, 5), Piece("w", WEIGHT[:2], (2, 0), (6, 10))], group)


def test_a_full_disk_is_the_reason_of_a_failed_save(group: dist.ProcessGroup, tmp_path: Path) -> None:
    with full_disk(600), pytest.raises(CheckpointError, match="File too large"):
        Saving(str(tmp_path), [whole("w", torch.zeros(100_000))], group, background=False).finish(60)
    assert str(disk_error(ValueError("mine"))) == "mine"
