"""Storages laid out in host buckets: every byte once, in order, within the bucket size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagrl.workers.train.offload import bucket_spans


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_spans_cover_every_storage_and_fill_buckets_in_order(sizes: list[int], bucket_bytes: int) -> None:
    spans = bucket_spans(sizes, bucket_bytes)
    for storage, size in enumerate(sizes):
        own = [span for span in spans if span.storage == storage]
        assert [byte for span in own for byte in range(span.start, span.stop)] == list(range(size))
    places = [
        span.bucket * bucket_bytes + byte
        for span in spans
        for byte in range(span.offset, span.offset + span.stop - span.start)
    ]
    assert places == list(range(sum(sizes)))
    assert all(span.offset + span.stop - span.start <= bucket_bytes for span in spans)
