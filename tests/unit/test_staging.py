"""Staging without a GPU: copies side by side in few buckets, each with a storage of its own size."""

from __future__ import annotations

import torch

from workers.megatron.staging import Staging

SHAPES = [((300, 7), torch.float32), ((5,), torch.bfloat16), ((2, 3, 4), torch.float32), ((1,), torch.int64)] * 40
BUCKET = 1 << 12


def test_copies_lie_side_by_side_and_are_saved_alone() -> None:
    staging = Staging(BUCKET)
    values = [torch.randn(shape).to(dtype) for shape, dtype in SHAPES]
    copies = [staging.room_for(value).copy_(value) for value in values]
    for copy, value in zip(copies, values, strict=True):
        assert torch.equal(copy, value) and copy.dtype == value.dtype
        assert copy.untyped_storage().nbytes() == value.nbytes  # torch.save writes whole storages
    assert staging.nbytes < sum(value.nbytes for value in values) * 2
    assert all(bucket.nbytes.bit_count() == 1 for bucket in staging._buckets)  # what pinned memory is rounded up to
    assert len(staging._buckets) == 40  # a large one needs a bucket of its own; the small ones lie behind the first of them


def test_a_copy_in_host_memory_is_not_the_original() -> None:
    value = torch.arange(6.0)
    copy = Staging().copy(value)
    value.zero_()
    assert copy.tolist() == [0, 1, 2, 3, 4, 5]
