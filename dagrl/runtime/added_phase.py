"""A phase that a scheduler has: its graphs, the room in their channels, and how an input is shared out over shards."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from dagrl.errors import RunError
from dagrl.runtime.compile import Compiled
from dagrl.runtime.edges.packet import ENVELOPE_BYTES, encoded, payload_bytes
from dagrl.runtime.edges.pickling import Encoded, Shares
from dagrl.runtime.executors.base import GraphLimits
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.phase import Phase
from dagrl.runtime.replay import Durations, ReplayQueue
from dagrl.runtime.shapes import (
    Bucket,
    FieldTypes,
    Scalar,
    check_batch,
    choose_bucket,
    empty_batch,
    field_types,
    longest_row,
    padding_share,
)
from dagrl.runtime.split import Codec, Join, Split, check_rows, share_out, split_rows
from dagrl.runtime.worker_group import WorkerGroup


@dataclass
class AddedPhase:
    """A phase that was added, with its graphs."""

    phase: Phase
    graph: PhaseGraph
    buckets: tuple[Bucket, ...]
    scalars: Mapping[str, Scalar]
    token_ids: int | None
    warmup_value: object
    codec: Codec | None
    limits: GraphLimits
    in_flight: ReplayQueue
    durations: Durations
    compiled: list[Compiled] = field(default_factory=list)
    groups: Mapping[str, WorkerGroup] = field(default_factory=dict)  # that it is compiled on
    replays: int = 0

    @functools.cached_property
    def fields(self) -> FieldTypes | None:
        """The types of its batches' fields; None if it takes no batches."""
        return None if self.phase.inputs is None else field_types(self.phase.inputs)

    @property
    def shards(self) -> int:
        """How many data-parallel shards (graphs as they were traced) the phase is compiled on."""
        return sum(len(graph.shards) for graph in self.compiled)

    def warmup_inputs(self) -> list[object]:
        """Returns the inputs at which the phase is warmed up, the largest first."""
        if self.phase.inputs is None:
            return [] if self.codec is not None and self.warmup_value is None else [self.warmup_value]
        shards = self.shards
        largest_first = sorted(self.buckets, key=lambda bucket: -bucket.sequences * bucket.tokens)
        whole = [Bucket(bucket.sequences * shards, bucket.tokens) for bucket in largest_first]
        return [empty_batch(self.phase.inputs, bucket, self.scalars, self.token_ids) for bucket in whole]

    def check_sizes(self, values: Sequence[object]) -> None:
        """Raises RunError if an input does not fit. Only those that a codec split have different sizes."""
        for graph, value in zip(self.compiled, values, strict=True):
            splits = self.fields is not None or type(value) is Shares
            needed = -(-payload_bytes(value) // (len(graph.shards) if splits else 1)) + ENVELOPE_BYTES
            if needed > self.limits.input_bytes:
                raise RunError(
                    f"the input of phase {self.phase.name!r} needs {needed} bytes per shard, but its channel has room for "
                    f"{self.limits.input_bytes}; raise {self.limits.input_key}"
                )
            if type(value) not in (Encoded, Shares):
                break

    def share_out(
        self, value: object, rows: Sequence[npt.NDArray[np.intp]] | None
    ) -> tuple[list[object], Join, Bucket | None, float | None]:
        """Returns the input of each graph, how results of shards are joined, the bucket and the share of padding."""
        here, graphs = self._places()
        if self.fields is None:
            return (*share_out(self.phase.name, self.codec, value, graphs), None, None)
        value = check_batch(self.phase.name, value, self.fields)
        longest = longest_row(self.phase.name, value)
        lengths = value["lengths"].astype("int64")
        if rows is None:
            rows = split_rows(lengths, len(here))
        else:
            named = len(rows) > max(len(here), here[-1])  # also those without workers, which get no rows
            if named and not any(len(mine) for shard, mine in enumerate(rows) if shard not in here):
                rows = [rows[shard] for shard in here]
            check_rows(self.phase.name, rows, len(here), value.rows)
        bucket = choose_bucket(self.buckets, max(map(len, rows)), longest)
        split = Split(tuple(rows), bucket, value.tokens or longest)
        return [split.share(value, mine) for mine in graphs], split.join, bucket, padding_share(lengths, bucket, len(here))

    def _places(self) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
        """Returns the shards that have workers, and for each graph where its own are among them."""
        graphs: list[Sequence[int]] = [graph.shards for graph in self.compiled]
        here: Sequence[int] = range(sum(map(len, graphs)))
        if max(chain.from_iterable(graphs)) in here:  # none is missing
            return here, graphs
        here = sorted(chain.from_iterable(graphs))
        return here, [[here.index(shard) for shard in mine] for mine in graphs]


def channel_bytes(
    phase: Phase,
    buckets: Sequence[Bucket],
    scalars: Mapping[str, Scalar] | None = None,
    warmup_values: Sequence[object] = (None,),
) -> int:
    """Returns the room for one shard's input in its channel: that of the largest warm-up input."""
    samples: Sequence[object] = [encoded(value) for value in warmup_values]
    if phase.inputs is not None:
        samples = [empty_batch(phase.inputs, bucket, scalars) for bucket in buckets]
    return max(map(payload_bytes, samples)) + 2 * ENVELOPE_BYTES
