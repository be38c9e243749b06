"""Staged copies share few buckets, each with a storage of its exact size. Uploads keep values and types."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dagrl.workers.train.host_memory import StagingBuffers, upload

from dagrl.workers.train import host_memory

SHAPES = [((300, 7), torch.float32), ((5,), torch.bfloat16), ((2, 3, 4), torch.float32), ((1,), torch.int64)] * 40


def test_copies_share_buckets_but_are_saved_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "BUCKET_BYTES", 1 << 12)
    staging = StagingBuffers()
    values = [torch.randn(shape).to(dtype) for shape, dtype in SHAPES]
    copies = [staging.room_for(value).copy_(value) for value in values]
    for copy, value in zip(copies, values, strict=True):
        assert torch.equal(copy, value) and copy.dtype == value.dtype
        assert copy.untyped_storage().nbytes() == value.nbytes  # torch.save writes whole storages
    assert sum(bucket.nbytes for bucket in staging._buckets) < sum(value.nbytes for value in values) * 2
    assert all(bucket.nbytes.bit_count() == 1 for bucket in staging._buckets)  # powers of two, as pinned memory is rounded
    assert len(staging._buckets) == 40  # each large copy needs its own bucket; the small ones fit after the first


def test_copies_of_host_tensors_are_independent() -> None:
    value = torch.arange(6.0)
    copy = StagingBuffers().copy(value)
    value.zero_()
    assert copy.tolist() == [0, 1, 2, 3, 4, 5]


def test_arrays_arrive_with_their_types_and_shapes() -> None:
    generator = np.random.default_rng(0)
    sent = [
        generator.integers(0, 9, (3, 5)),
        generator.normal(size=7).astype(np.float32),
        generator.integers(0, 9, 1).astype(np.int32),
        np.zeros((2, 0), np.float32),
        generator.normal(size=(2, 3)),
        generator.integers(0, 2, 3).astype(np.bool_),
    ]
    arrived = upload(sent, torch.device("cpu"))
    for tensor, array in zip(arrived, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    arrived[0].zero_()
    np.testing.assert_array_equal(arrived[1].numpy(), sent[1])
    assert upload([], torch.device("cpu")) == []
