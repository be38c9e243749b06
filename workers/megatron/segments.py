"""Segments: which tokens of a microbatch attend to which, when its rows are packed or cut over context-parallel workers.

A microbatch of `b` rows is read row after row, as `b * s` tokens. A segment is a run of queries and the keys they see, and
is causal from its end: the last query sees every key of the segment, the one before it all but the last, and so on. A
packed sequence is one segment. Under context parallelism a worker holds two chunks of every sequence (`zigzag`), which
makes two segments: each has the chunk's queries and all keys up to the chunk's end, taken out of the gathered keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.megatron.upload import upload

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """`n` segments. Travels through Megatron as its `packed_seq_params`, of which it reads the two class variables.

    `query_starts` and `key_starts` [n + 1] int32 are offsets, on the device; `key_order` says where the keys lie among those
    of all context-parallel workers, gathered in rank order; None: keys lie as queries do.
    """

    qkv_format: ClassVar[str] = "sbhd"  # Megatron rotates and shapes as in any other microbatch
    cp_group: ClassVar[None] = None

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_starts: Tensor
    key_starts: Tensor
    key_order: Tensor | None

    @property
    def longest_query(self) -> int:
        """Queries of the largest segment."""
        return max(self.query_lengths)

    @property
    def longest_key(self) -> int:
        """Keys of the largest segment."""
        return max(self.key_lengths)


def zigzag(places: Tensor, held: Tensor, size: int, rank: int) -> Tensor:
    """Positions in their sequences of tokens that context-parallel worker `rank` of `size` holds; `places` where it is one.

    `places` count what the worker holds of a token's sequence, `held` tokens: chunks `rank` and `2 size - 1 - rank` of
    `2 size`. The cut balances causal attention (`get_batch_on_this_cp_rank` in Megatron).
    """
    if size == 1:
        return places
    chunk = held // 2
    return places + torch.where(places < chunk, rank, 2 * size - 2 - rank) * chunk


def make_segments(rows: Sequence[Sequence[int]], size: int, rank: int, device: torch.device) -> Segments:
    """The segments of a microbatch for context-parallel worker `rank` of `size`.

    `rows` are the lengths of the sequences in each row, before the cut: multiples of `2 size` where size is above 1.
    """
    if size == 1:
        lengths = [length for row in rows for length in row]
        (starts,) = upload([_starts(lengths)], device)
        return Segments(tuple(lengths), tuple(lengths), starts, starts, None)
    queries: list[int] = []
    keys: list[Indices] = []
    width = sum(rows[0]) // size  # tokens of a row on one worker
    for number, row in enumerate(rows):
        start = number * width
        for length in row:
            chunk = length // (2 * size)
            places = _chunk_places(start, chunk, len(rows) * width, size)
            for held in (rank, 2 * size - 1 - rank):
                queries.append(chunk)
                keys.append(np.concatenate(places[: held + 1]))
            start += 2 * chunk
    lengths = [len(places) for places in keys]
    query_starts, key_starts, order = upload([_starts(queries), _starts(lengths), np.concatenate(keys)], device)
    return Segments(tuple(queries), tuple(lengths), query_starts, key_starts, order)


def _chunk_places(start: int, chunk: int, tokens: int, size: int) -> list[Indices]:
    """Where each of a sequence's `2 size` chunks lies among the gathered keys; `start` is its first token on any worker."""
    first = [number * tokens + start for number in range(size)]
    second = [number * tokens + start + chunk for number in reversed(range(size))]
    return [np.arange(place, place + chunk) for place in (*first, *second)]


def _starts(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)
