"""Splits inputs over the data-parallel shards, and joins the shards' results: batches by rows, other types by a codec.

scheduler.add(train, codec=Codec(lambda value, n: value.chunk(n), torch.cat), input_bytes=256 << 20)
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.errors import DataError, RunError, error_text
from dagrl.runtime.edges.packet import encoded
from dagrl.runtime.edges.pickling import Encoded, Shares
from dagrl.runtime.shapes import Array, Batch, Bucket, pad_rows


def split_rows(lengths: npt.NDArray[np.int64], shards: int, together: int = 1) -> list[npt.NDArray[np.intp]]:
    """Returns the row positions of each shard: equal counts (within one), balanced tokens, in input order.

    Deals rows longest first, each to the shard with the fewest tokens among those that still have room. Groups of `together`
    neighbours stay together, or parts of them, as large as equal counts allow; above two rows, four fit a shard.
    """
    if shards == 1:
        return [np.arange(len(lengths))]
    each = len(lengths) // shards
    run = math.gcd(together, each) if each * shards == len(lengths) else 1
    while run > 2 and run % 2 == 0 and each < 4 * run:
        run //= 2
    if run > 1:
        parts = split_rows(lengths.reshape(-1, run).sum(axis=1), shards)
        return [(part[:, None] * run + np.arange(run)).ravel() for part in parts]
    if len(lengths) == shards:  # one row each; takes a tenth of the time of the loop below
        return list(np.argsort(-lengths, kind="stable").reshape(shards, 1))
    room = [len(lengths) // shards + (shard < len(lengths) % shards) for shard in range(shards)]
    rows: list[list[int]] = [[] for _ in range(shards)]
    open_shards = [(0, shard) for shard in range(shards) if room[shard]]  # a heap of (tokens, shard)
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, shard = open_shards[0]
        rows[shard].append(row)
        if len(rows[shard]) < room[shard]:
            heapq.heapreplace(open_shards, (tokens + int(lengths[row]), shard))
        else:
            heapq.heappop(open_shards)
    return [np.array(sorted(mine), dtype=np.intp) for mine in rows]


def check_rows(phase: str, rows: Sequence[npt.NDArray[np.intp]], shards: int, count: int) -> None:
    """Raises RunError unless `rows` deals each of `count` rows to exactly one shard."""
    if len(rows) != shards:
        raise RunError(f"phase {phase!r} runs on {shards} shards, but `rows` has {len(rows)} arrays; give one per shard")
    if not np.array_equal(np.sort(np.concatenate(rows)), np.arange(count)):
        raise RunError(f"phase {phase!r}: `rows` must hold each row position from 0 to {count - 1} exactly once")


@dataclass(frozen=True)
class Split:
    """The rows of a batch by shard, the bucket they are padded to, and the width of joined tokens."""

    rows: tuple[npt.NDArray[np.intp], ...]
    bucket: Bucket
    tokens: int

    def share(self, batch: Batch, shard: int) -> Batch:
        """Returns the rows of a shard, padded to the bucket; views if they follow each other and fill it."""
        numbers = self.rows[shard].tolist()
        first, end = (numbers[0], numbers[0] + len(numbers)) if numbers else (0, 0)
        order = slice(first, end) if numbers == list(range(first, end)) else self.rows[shard]
        return Batch({name: self._field(array, order) for name, array in batch.fields.items()}, batch.scalars)

    def _field(self, array: Array, order: slice | npt.NDArray[np.intp]) -> Array:
        """Returns one field, `[rows]` or `[rows, tokens]`, of the rows in `order`."""
        kept = array[:, : self.bucket.tokens] if array.ndim == 2 else array
        dealt = kept[order] if isinstance(order, slice) else kept.take(order, axis=0)  # copies whole rows, unlike indexing
        filled = dealt.shape == (self.bucket.sequences, self.bucket.tokens)[: array.ndim]
        return dealt if filled else pad_rows(dealt, self.bucket)

    def join(self, values: Sequence[object]) -> object:
        """Returns the shards' results as one batch if all are batches, else as a tuple."""
        batches = [value for value in values if isinstance(value, Batch)]
        return self.restore(batches) if len(batches) == len(values) else tuple(values)

    def restore(self, shards: Sequence[Batch]) -> Batch:
        """Joins each shard's batch into one, in the order of the input's rows, without padding. Raises DataError."""
        for shard in shards:
            self._check_result(shard, shards[0])
        order = np.argsort(np.concatenate(self.rows), kind="stable")
        fields = {}
        for name in shards[0].fields:
            kept = [shard[name][: len(rows)] for shard, rows in zip(shards, self.rows, strict=True)]
            joined = np.concatenate(kept)[order]
            fields[name] = joined[:, : self.tokens] if joined.ndim == 2 else joined
        return Batch(fields, shards[0].scalars)

    def _check_result(self, shard: Batch, first: Batch) -> None:
        """Raises DataError if a shard's batch does not have the bucket's shape, or not the fields of `first`."""
        if shard.fields.keys() != first.fields.keys():
            raise DataError(f"one shard returned the fields {sorted(first.fields)}, another {sorted(shard.fields)}")
        narrow, wide = (self.bucket.sequences,), (self.bucket.sequences, self.bucket.tokens)
        for name, array in shard.fields.items():
            if array.shape not in (narrow, wide):
                raise DataError(
                    f"field {name!r} has the shape {list(array.shape)}, but the workers were given bucket {self.bucket}. "
                    f"Return {list(narrow)} or {list(wide)}: one row per input row, including padding"
                )


Join = Callable[[list[Any]], Any]  # makes one result of the shards' results


@dataclass(frozen=True)
class Codec:
    """`split(value, n)` returns a part for each of `n` shards; `join(parts)` makes one result of the shards' results.

    A part may be of any type that pickles. Arrays and tensors in it are not copied into the pickle. Parts that are the same
    object are pickled once. A `Shares` has a part for each worker of the shard.
    """

    split: Callable[[Any, int], Sequence[Any]]
    join: Join = tuple

    def parts(self, phase: str, value: object, shards: int) -> list[Any]:
        """Returns the parts of an input. Raises DataError if `split` raises, or returns another number of them."""
        try:
            parts = list(self.split(value, shards))
        except Exception as error:  # a user's function may raise anything
            raise DataError(
                f"phase {phase!r}: its codec cannot split a {type(value).__name__} over {shards} shards: "
                f"{error_text(error)}. Give the phase what its codec takes, or correct `split`"
            ) from error
        if len(parts) != shards:
            raise DataError(
                f"phase {phase!r} runs on {shards} shards, but its codec split a {type(value).__name__} into {len(parts)} "
                "parts; return one part per shard"
            )
        return parts


def share_out(phase: str, codec: Codec | None, value: object, shards: int) -> tuple[list[object], Join]:
    """Returns the input of each shard's graph, and how the results of all shards are joined.

    Without a codec, every shard takes the whole value.
    """
    if codec is None:
        whole = Encoded.of(value) if isinstance(value, Batch) else encoded(value)  # a batch would be taken apart
        return [whole] * shards, tuple
    parts = codec.parts(phase, value, shards)
    distinct = {id(part): part for part in parts}
    inputs = {key: part if isinstance(part, Shares) else Encoded.of(part) for key, part in distinct.items()}
    return [inputs[id(part)] for part in parts], codec.join
