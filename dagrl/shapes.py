"""Batches, the padded shapes they are replayed at, and how their rows are shared out over the shards.

A `Batch` is what goes through a phase: arrays with one row a sequence, and scalars. Token fields are *token aligned*:
entry `t` of a row belongs to token `t`, so a log-probability at `t` is that of token `t` given the tokens before it, and
entry 0 of a log-probability or a loss mask is 0. Rows are padded on the right.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dagrl.errors import ConfigError, DataError, GraphError, RunError

Array = npt.NDArray[Any]
Scalar = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """One array of a batch: its dtype, and whether a row is one number (`row`) or one number a token (`token`)."""

    dtype: str
    extent: Literal["row", "token"] = "token"


InputSpec = Mapping[str, Field]


@dataclass(frozen=True)
class Bucket:
    """A padded shape: `sequences` rows of `tokens` tokens on one shard."""

    sequences: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.tokens}"


@dataclass(frozen=True)
class Batch:
    """Rows for one replay: `fields` are `[rows]` or `[rows, tokens]` arrays, `scalars` are the same on every shard.

    `lengths` `[rows]`, the tokens of each row, must be among the fields; 0 marks a padding row.
    """

    fields: Mapping[str, Array]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "lengths" not in self.fields:
            raise DataError(f"a batch needs the field 'lengths' [rows]; found {sorted(self.fields)}")
        for name, array in self.fields.items():
            if not isinstance(array, np.ndarray) or not 1 <= array.ndim <= 2:
                found = f"{array.ndim} dimensions" if isinstance(array, np.ndarray) else f"the type {type(array).__name__}"
                raise DataError(f"field {name!r} has {found}; fields are numpy arrays [rows] or [rows, tokens]")
        rows = self.rows
        for name, array in self.fields.items():
            if len(array) != rows:
                raise DataError(f"field {name!r} has {len(array)} rows, but 'lengths' has {rows}")

    @property
    def rows(self) -> int:
        """Number of rows, padding rows included."""
        return len(self.fields["lengths"])

    @property
    def tokens(self) -> int:
        """Width of the token fields; 0 when there are none."""
        return max((array.shape[1] for array in self.fields.values() if array.ndim == 2), default=0)

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]

    def select(self, rows: Sequence[int] | npt.NDArray[np.intp]) -> Batch:
        """The rows at the given positions, in that order."""
        index = np.asarray(rows, dtype=np.intp)
        return Batch({name: array[index] for name, array in self.fields.items()}, self.scalars)

    def share(self, index: int, count: int) -> Batch:
        """The rows of one of `count` shards, of a batch that holds as many rows of each, one shard's after the other's."""
        rows = self.rows // count
        mine = slice(index * rows, (index + 1) * rows)
        return Batch({name: array[mine] for name, array in self.fields.items()}, self.scalars)

    def with_fields(self, **fields: Array) -> Batch:
        """This batch with fields added or replaced."""
        return Batch({**self.fields, **fields}, self.scalars)

    def number(self, name: str, default: float | None = None) -> float:
        """A scalar that is a number; raises DataError where it is none, or missing without a default."""
        value = self.scalars.get(name, default)
        if not isinstance(value, int | float | np.number):
            raise DataError(f"the scalar {name!r} of a batch is {value!r}; expected a number")
        return float(value)

    def with_scalars(self, **scalars: Scalar) -> Batch:
        """This batch with scalars added or replaced."""
        return Batch(self.fields, {**self.scalars, **scalars})

    def pad(self, bucket: Bucket) -> Batch:
        """The batch at the bucket's shape: zeros on the right and below. Raises DataError when it does not fit."""
        longest = int(self["lengths"].max(initial=0))
        if self.rows > bucket.sequences or longest > bucket.tokens:
            raise DataError(f"a batch of {self.rows} rows, the longest of {longest} tokens, does not fit bucket {bucket}")
        return Batch({name: pad_rows(array, [self.rows], bucket) for name, array in self.fields.items()}, self.scalars)


def pad_rows(array: Array, counts: Sequence[int], bucket: Bucket) -> Array:
    """A copy of rows of several shards, `counts` of each, one shard's after the other's, with each shard's at `bucket`.

    `array`: `[rows]` or `[rows, tokens]`; what is wider than the bucket is cut.
    """
    wide = [bucket.tokens] if array.ndim == 2 else []
    padded, start = np.zeros((len(counts), bucket.sequences, *wide), array.dtype), 0
    for shard, count in enumerate(counts):
        rows = array[start : start + count]
        part = rows[:, : bucket.tokens] if wide else rows
        place: tuple[int | slice, ...] = (shard, *map(slice, part.shape))
        padded[place] = part
        start += count
    return padded.reshape(len(counts) * bucket.sequences, *wide)


FieldTypes = Mapping[str, tuple[np.dtype[Any], int]]
"""The dtype and the dimensions of each field."""


def field_types(spec: InputSpec) -> FieldTypes:
    """What the fields of a batch must be; `lengths` is always one of them. Raises GraphError for what is no dtype."""
    spec = {"lengths": Field("int64", "row"), **spec}
    return {name: (_dtype(name, item), 1 if item.extent == "row" else 2) for name, item in spec.items()}


def _dtype(name: str, item: Field) -> np.dtype[Any]:
    try:
        return np.dtype(item.dtype)
    except TypeError as error:
        raise GraphError(
            f"the field {name!r} of a phase's inputs is of {item.dtype!r}, which is no dtype of numpy's; write one that is, "
            "such as int64, float32, or uint8 for numbers that numpy lacks"
        ) from error


def check_batch(phase: str, value: object, expected: FieldTypes) -> Batch:
    """`value`, if it is a batch of the fields that a phase takes; else raises DataError."""
    if not isinstance(value, Batch):
        raise DataError(
            f"phase {phase!r} takes a batch of {_types_text(expected)}; it was given a {type(value).__name__}. Make a "
            "dagrl.shapes.Batch of the arrays"
        )
    found = {name: (array.dtype, array.ndim) for name, array in value.fields.items()}
    if found != expected:
        missing = {name: item for name, item in expected.items() if found.get(name) != item}
        others = {name: item for name, item in found.items() if expected.get(name) != item}
        raise DataError(
            f"phase {phase!r} was given a batch without {_types_text(missing)} and with {_types_text(others)}. Convert "
            "these arrays, add or leave out what is too few or too many, or correct the phase's `inputs`"
        )
    return value


def longest_row(phase: str, batch: Batch) -> int:
    """Tokens of a batch's longest row, 1 if there are no rows. Raises DataError for rows that its fields do not hold."""
    lengths = batch["lengths"].tolist()
    longest = max(lengths, default=1)
    if lengths and (
        min(lengths) < 0 or any([array.shape[-1] < longest for array in batch.fields.values() if array.ndim == 2])
    ):
        widths = {name: array.shape[1] for name, array in batch.fields.items() if array.ndim == 2}
        raise DataError(
            f"phase {phase!r} was given rows with `lengths` from {min(lengths)} to {longest}, in fields of so many tokens: "
            f"{widths}; `lengths` are the tokens of each row, padding not counted"
        )
    return longest


def _types_text(types: FieldTypes) -> str:
    texts = [f"{name} {dtype} [rows{', tokens' * (dimensions - 1)}]" for name, (dtype, dimensions) in types.items()]
    return ", ".join(texts) or "any other"


def empty_batch(
    spec: InputSpec, bucket: Bucket, scalars: Mapping[str, Scalar] | None = None, token_ids: int | None = None
) -> Batch:
    """A batch of `bucket`'s shape made from an input specification, for warm-up: every row full, all values 1.

    With `token_ids` the field `tokens` is drawn from so many ids, each time alike. A mixture of experts sends equal tokens
    to the same few experts, whose workers would need more memory than they ever do in training.
    """
    fields = {
        name: np.ones((bucket.sequences,) if item.extent == "row" else (bucket.sequences, bucket.tokens), item.dtype)
        for name, item in spec.items()
    }
    fields["lengths"] = np.full(bucket.sequences, bucket.tokens, field_types(spec)["lengths"][0])
    if token_ids is not None and "tokens" in fields:
        shape = fields["tokens"].shape
        fields["tokens"] = np.random.default_rng(0).integers(token_ids, size=shape).astype(spec["tokens"].dtype)
    return Batch(fields, dict(scalars or {}))


def choose_bucket(buckets: Sequence[Bucket], rows: int, tokens: int) -> Bucket:
    """The smallest bucket (by area) that holds `rows` rows of `tokens` tokens; ConfigError names the largest otherwise."""
    fitting = [bucket for bucket in buckets if bucket.sequences >= rows and bucket.tokens >= tokens]
    if not fitting:
        raise ConfigError(
            f"no bucket holds {rows} rows of {tokens} tokens on one shard; the largest is {max(buckets, key=_area)}. "
            "Add a larger one (policy.sequence_buckets, or Scheduler.add(..., buckets=...)), or shorten the data"
        )
    return min(fitting, key=_area) if len(fitting) > 1 else fitting[0]


def _area(bucket: Bucket) -> tuple[int, int]:
    return bucket.sequences * bucket.tokens, bucket.tokens


def split_rows(lengths: npt.NDArray[np.int64], shards: int) -> list[npt.NDArray[np.intp]]:
    """Row positions for each shard: equal row counts (within one), tokens balanced, each shard's rows in input order.

    Rows are dealt longest first, each to the shard with the fewest tokens among those that still have room.
    """
    if shards == 1:
        return [np.arange(len(lengths))]
    if len(lengths) == shards:  # a row each: the deal below in a tenth of the time
        return list(np.argsort(-lengths, kind="stable").reshape(shards, 1))
    room = [len(lengths) // shards + (shard < len(lengths) % shards) for shard in range(shards)]
    taken: list[list[int]] = [[] for _ in range(shards)]
    open_shards = [(0, shard) for shard in range(shards) if room[shard]]  # a heap of (tokens, shard)
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, shard = open_shards[0]
        taken[shard].append(row)
        if len(taken[shard]) < room[shard]:
            heapq.heapreplace(open_shards, (tokens + int(lengths[row]), shard))
        else:
            heapq.heappop(open_shards)
    return [np.array(sorted(rows), dtype=np.intp) for rows in taken]


def check_rows(phase: str, rows: Sequence[npt.NDArray[np.intp]], shards: int, count: int) -> None:
    """Raise RunError unless `rows` deals each of `count` rows to one of the shards."""
    if len(rows) != shards:
        raise RunError(f"phase {phase!r} runs on {shards} shards, but `rows` deals to {len(rows)}; give one array a shard")
    if not np.array_equal(np.sort(np.concatenate(rows)), np.arange(count)):
        raise RunError(f"phase {phase!r}: `rows` must hold each of the positions 0 to {count - 1} of the batch's rows once")


def padding_share(lengths: npt.NDArray[np.int64], bucket: Bucket, shards: int) -> float:
    """Share of the replayed tokens that are padding, 0 to 1."""
    return 1.0 - float(lengths.sum()) / (bucket.sequences * bucket.tokens * shards)
