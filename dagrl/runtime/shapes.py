"""Batches, and the padded shapes (buckets) that they are replayed at.

A `Batch` is the input of a phase: arrays with one row per sequence, and scalars. Token fields are *token aligned*: entry `t`
of a row belongs to token `t`. A log-probability at `t` is that of token `t` given the tokens before it, and entry 0 of a
log-probability or a loss mask is 0. Rows are padded on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dagrl.errors import DataError, GraphError

Array = npt.NDArray[Any]
Scalar = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """One array of a batch: its dtype, and whether a row holds one number (`row`) or one number per token (`token`)."""

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

    The fields must include `lengths` `[rows]`, the number of tokens in each row; 0 marks a padding row.
    """

    fields: Mapping[str, Array]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "lengths" not in self.fields:
            raise DataError(f"a batch needs the field 'lengths' [rows]; found {sorted(self.fields)}")
        for name, array in self.fields.items():
            if not isinstance(array, np.ndarray) or not 1 <= array.ndim <= 2:
                shape = f"{array.ndim} dimensions" if isinstance(array, np.ndarray) else f"the type {type(array).__name__}"
                raise DataError(f"field {name!r} has {shape}; fields are numpy arrays [rows] or [rows, tokens]")
        rows = self.rows
        for name, array in self.fields.items():
            if len(array) != rows:
                raise DataError(f"field {name!r} has {len(array)} rows, but 'lengths' has {rows}")

    @property
    def rows(self) -> int:
        """Number of rows, including padding rows."""
        return len(self.fields["lengths"])

    @property
    def tokens(self) -> int:
        """Width of the token fields; 0 if there are none."""
        return max((array.shape[1] for array in self.fields.values() if array.ndim == 2), default=0)

    def __getitem__(self, name: str) -> Array:
        """Returns a field. Raises DataError if there is none of this name."""
        try:
            return self.fields[name]
        except KeyError:
            raise DataError(
                f"a batch has no field {name!r}; it has {', '.join(self.fields)}. Correct the name, or add it to the "
                "batch, and to the `inputs` of its phase"
            ) from None

    def select(self, rows: Sequence[int] | npt.NDArray[np.intp]) -> Batch:
        """Returns the rows at the given positions, in that order."""
        index = np.asarray(rows, dtype=np.intp)
        return Batch({name: array[index] for name, array in self.fields.items()}, self.scalars)

    def share(self, index: int, count: int) -> Batch:
        """Returns the rows of shard `index`, if the batch holds equally many rows of `count` shards, one after the other."""
        rows = self.rows // count
        mine = slice(index * rows, (index + 1) * rows)
        return Batch({name: array[mine] for name, array in self.fields.items()}, self.scalars)

    def with_fields(self, **fields: Array) -> Batch:
        """Returns this batch with fields added or replaced."""
        return Batch({**self.fields, **fields}, self.scalars)

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a scalar as a float. Raises DataError if it is no number, or missing without a default."""
        value = self.scalars.get(name, default)
        if value is None:
            raise DataError(
                f"a batch has no scalar {name!r}; it has {', '.join(self.scalars) or 'none'}. Give it one: "
                f"batch.with_scalars({name}=...), in a warm-up Scheduler.add(..., scalars={{{name!r}: ...}})"
            )
        if not isinstance(value, int | float | np.number):
            raise DataError(f"the scalar {name!r} of a batch is {value!r}; expected a number")
        return float(value)

    def with_scalars(self, **scalars: Scalar) -> Batch:
        """Returns this batch with scalars added or replaced."""
        return Batch(self.fields, {**self.scalars, **scalars})


def pad_rows(array: Array, bucket: Bucket) -> Array:
    """Returns a copy of an array, `[rows]` or `[rows, tokens]`, padded to `bucket`. Columns beyond its width are cut."""
    kept = array[:, : bucket.tokens] if array.ndim == 2 else array
    padded = np.zeros((bucket.sequences, bucket.tokens)[: array.ndim], array.dtype)
    padded[tuple(map(slice, kept.shape))] = kept
    return padded


FieldTypes = Mapping[str, tuple[np.dtype[Any], int]]  # the dtype and the number of dimensions of each field


def field_types(spec: InputSpec) -> FieldTypes:
    """Returns the type of every field, always including `lengths`. Raises GraphError for an unknown dtype."""
    spec = {"lengths": Field("int64", "row"), **spec}
    return {name: (_dtype(name, item), 1 if item.extent == "row" else 2) for name, item in spec.items()}


def _dtype(name: str, item: Field) -> np.dtype[Any]:
    try:
        return np.dtype(item.dtype)
    except TypeError as error:
        raise GraphError(
            f"the field {name!r} of a phase's inputs has the dtype {item.dtype!r}, which numpy does not have; use one of "
            "numpy's, such as int64 or float32, or uint8 for the bytes of another"
        ) from error


def check_batch(phase: str, value: object, expected: FieldTypes) -> Batch:
    """Returns `value` if it is a batch of exactly the `expected` fields. Raises DataError otherwise."""
    if not isinstance(value, Batch):
        raise DataError(
            f"phase {phase!r} takes a batch of {types_text(expected)}; it was given a {type(value).__name__}. Make a "
            "dagrl.Batch of the arrays"
        )
    types = {name: (array.dtype, array.ndim) for name, array in value.fields.items()}
    if types != expected:
        missing = {name: item for name, item in expected.items() if types.get(name) != item}
        others = {name: item for name, item in types.items() if expected.get(name) != item}
        lacks, has = f"lacks {types_text(missing)}", f"has {types_text(others)}, not among its `inputs`"
        raise DataError(
            f"the batch of phase {phase!r} {' and '.join([lacks] * bool(missing) + [has] * bool(others))}. Convert, add or "
            "remove these arrays, or correct the `inputs`"
        )
    return value


def longest_row(phase: str, batch: Batch) -> int:
    """Returns the tokens of the longest row, 1 for a batch without rows. Raises DataError if `lengths` exceed a field."""
    lengths = batch["lengths"].tolist()
    longest = max(lengths, default=1)
    if lengths and (
        min(lengths) < 0 or any([array.shape[-1] < longest for array in batch.fields.values() if array.ndim == 2])
    ):
        widths = {name: array.shape[1] for name, array in batch.fields.items() if array.ndim == 2}
        raise DataError(
            f"phase {phase!r} was given `lengths` from {min(lengths)} to {longest}, but its fields hold this many tokens: "
            f"{widths}. `lengths` must be the tokens of each row without padding"
        )
    return longest


def types_text(types: FieldTypes) -> str:
    """Returns fields as they are written in errors."""
    return ", ".join(f"{name} {dtype} [rows{', tokens' * (dimensions - 1)}]" for name, (dtype, dimensions) in types.items())


def empty_batch(
    spec: InputSpec, bucket: Bucket, scalars: Mapping[str, Scalar] | None = None, token_ids: int | None = None
) -> Batch:
    """Returns a batch of `bucket`'s shape for warm-up: every row full, all values 1.

    With `token_ids`, the field `tokens` is drawn from that many ids, always the same. A mixture of experts would send equal
    tokens to the same few experts, whose workers would then need more memory than they ever do in training.
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
    """Returns the smallest bucket (by area) that holds `rows` rows of `tokens` tokens. Raises DataError if none does."""
    fitting = [bucket for bucket in buckets if bucket.sequences >= rows and bucket.tokens >= tokens]
    if not fitting:
        raise DataError(
            f"no bucket holds {rows} rows of {tokens} tokens on one shard; the largest is {max(buckets, key=_area)}. "
            "Add a larger one, Scheduler.add(..., buckets=[...]), or send fewer or shorter rows"
        )
    return min(fitting, key=_area) if len(fitting) > 1 else fitting[0]


def _area(bucket: Bucket) -> tuple[int, int]:
    return bucket.sequences * bucket.tokens, bucket.tokens


def padding_share(lengths: npt.NDArray[np.int64], bucket: Bucket, shards: int) -> float:
    """Returns the share of the replayed tokens that are padding, 0 to 1."""
    return 1.0 - float(lengths.sum()) / (bucket.sequences * bucket.tokens * shards)
