"""Host memory: storages laid out in buckets, staged copies with a storage of their exact size, uploads in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dagrl.workers.train import checkpoint
from dagrl.workers.train.checkpoint import StagingBuffers
from dagrl.workers.train.microbatches import upload
from dagrl.workers.train.offload import StateCopy, bucket_spans

SHAPES = [((300, 7), torch.float32), ((5,), torch.bfloat16), ((2, 3, 4), torch.float32), ((1,), torch.int64)] * 40


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_spans_cover_every_storage_and_fill_buckets_in_order(sizes: list[int], bucket_bytes: int) -> None:
    spans = bucket_spans(sizes, bucket_bytes)
    for storage, size in enumerate(sizes):
        parts = [span for span in spans if span.storage == storage]
        assert [byte for span in parts for byte in range(span.start, span.stop)] == list(range(size))
    ends = [span.offset + span.stop - span.start for span in spans]
    places = [
        span.bucket * bucket_bytes + byte for span, end in zip(spans, ends, strict=True) for byte in range(span.offset, end)
    ]
    assert places == list(range(sum(sizes))) and max(ends, default=0) <= bucket_bytes


@pytest.mark.parametrize(("constant", "second"), [(False, 2.0), (True, 1.0)])
def test_a_constant_state_is_copied_to_the_host_once(constant: bool, second: float) -> None:
    whole = torch.ones(8)
    state, view = StateCopy([whole[:3], whole[3:]], None, constant=constant), whole[3:]
    for value in (1.0, second):
        state.offload()
        assert whole.untyped_storage().nbytes() == 0
        state.reload()
        assert view.tolist() == [value] * 5
        whole.fill_(2.0)


def test_copies_share_buckets_but_are_saved_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "BUCKET_BYTES", 1 << 12)
    staging = StagingBuffers()
    values = [torch.randn(shape).to(dtype) for shape, dtype in SHAPES]
    copies = [staging.room_for(value).copy_(value) for value in values]
    for copy, value in zip(copies, values, strict=True):
        assert torch.equal(copy, value) and copy.dtype == value.dtype
        assert copy.untyped_storage().nbytes() == value.nbytes  # torch.save writes whole storages
    assert sum(bucket.nbytes for bucket in staging._buckets) < sum(value.nbytes for value in values) * 2
    assert all(bucket.nbytes.bit_count() == 1 for bucket in staging._buckets)  # powers of two, as pinned memory is rounded
    assert len(staging._buckets) == 40  # each large copy needs its own bucket; the small ones fit after the first
    value = torch.arange(6.0)
    copy = staging.copy(value)
    value.zero_()
    assert copy.tolist() == [0, 1, 2, 3, 4, 5], "copies of host tensors are independent"


def test_arrays_arrive_with_their_types_and_shapes() -> None:
    generator = np.random.default_rng(0)
    arrays = [
        generator.integers(0, 9, (3, 5)),
        generator.normal(size=7).astype(np.float32),
        generator.integers(0, 9, 1).astype(np.int32),
        np.zeros((2, 0), np.float32),
        generator.normal(size=(2, 3)),
        generator.integers(0, 2, 3).astype(np.bool_),
    ]
    tensors = upload(arrays, torch.device("cpu"))
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    assert upload([], torch.device("cpu")) == []
