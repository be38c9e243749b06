"""Storages cut into host buckets: every byte once, in order, and no bucket overfull."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.megatron.offload import cut


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_pieces_cover_every_storage_and_fill_buckets_one_after_the_other(sizes: list[int], bucket_bytes: int) -> None:
    pieces = cut(sizes, bucket_bytes)
    for storage, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.storage == storage]
        assert [byte for piece in own for byte in range(piece.start, piece.stop)] == list(range(size))
    places = [
        piece.bucket * bucket_bytes + byte
        for piece in pieces
        for byte in range(piece.offset, piece.offset + piece.stop - piece.start)
    ]
    assert places == list(range(sum(sizes)))
    assert all(piece.offset + piece.stop - piece.start <= bucket_bytes for piece in pieces)
