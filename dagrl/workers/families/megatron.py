"""How Megatron-Core's local layers shard a parameter.

Rules as in Megatron-Core 0.16: `transformer/attention.py` (query, key and value rows interleaved by query group),
`transformer/mlp.py` (gate above up in `linear_fc1`), `transformer/moe/experts.py` (contiguous experts a rank, one tensor
each), `models/gpt/gpt_model.py` (a copy of tied embeddings on the last stage). Tensor names are those of
`named_parameters()` and `named_buffers()`, with the prefix `vp{stage}.` where a rank has several virtual stages. Context and
sequence parallelism shard no weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.errors import LayoutError
from dagrl.refit.slices import STACKED, Box, WeightSlice
from dagrl.runtime.layout import Coordinates, ParallelLayout
from dagrl.workers.families.hf_config import ModelConfig

VOCABULARY_MULTIPLE = 128  # as Megatron's make_vocab_size_divisible_by


@dataclass(frozen=True)
class MegatronRank:
    """One rank, with methods that give its slices of parameters sharded in a common way."""

    layout: ParallelLayout
    at: Coordinates

    @property
    def tp(self) -> tuple[int, int]:
        """Number of shards of dense weights, and this rank's index."""
        return self.layout.tp, self.at.tp

    @property
    def expert_tp(self) -> tuple[int, int]:
        """Number of shards of an expert's weights, and this rank's index."""
        return self.layout.expert_tp, self.at.etp

    def rows(self, name: str, tensor: str, rows: int, columns: int, what: str) -> WeightSlice:
        """Returns a column-parallel weight: `name` sharded by rows."""
        shard = shard_range(rows, self.tp, f"{name}: {what}")
        return WeightSlice(name, (shard, (0, columns)), tensor, ((0, shard[1] - shard[0]), (0, columns)))

    def columns(self, name: str, tensor: str, rows: int, columns: int, what: str) -> WeightSlice:
        """Returns a row-parallel weight: `name` sharded by columns."""
        shard = shard_range(columns, self.tp, f"{name}: {what}")
        return WeightSlice(name, ((0, rows), shard), tensor, ((0, rows), (0, shard[1] - shard[0])))

    def gated_mlp(self, hf: str, local: str, hidden: int, width: int, what: str) -> Iterator[WeightSlice]:
        """Yields `linear_fc1` (this rank's `[gate; up]`) and `linear_fc2` (columns of down)."""
        shard = shard_range(width, self.tp, f"{hf}gate_proj.weight: {what}")
        size, columns = shard[1] - shard[0], (0, hidden)
        for index, name in enumerate((f"{hf}gate_proj.weight", f"{hf}up_proj.weight")):
            at = (index * size, (index + 1) * size)
            yield WeightSlice(name, (shard, columns), f"{local}linear_fc1.weight", (at, columns))
        yield self.columns(f"{hf}down_proj.weight", f"{local}linear_fc2.weight", hidden, width, what)

    def experts(
        self, hf: tuple[str, ...], local: str, count: int, hidden: int, width: int, what: str
    ) -> Iterator[WeightSlice]:
        """Yields this rank's experts, whole or sharded by etp. `hf` names gate, up and down.

        Names are stacks. The tensor of expert i is `local_experts.{i}.linear_fc1.weight`.
        """
        first, stop = shard_range(count, (self.layout.ep, self.at.ep), f"{hf[0]}: the experts", "ep")
        low, high = shard_range(width, self.expert_tp, f"{hf[0]}: {what}", "etp")
        experts, local_experts, size, columns = (first, stop), (0, stop - first), high - low, (0, hidden)
        fc1, fc2 = (f"{local}local_experts.{STACKED}.linear_fc{number}.weight" for number in (1, 2))
        for index, name in enumerate(hf[:-1]):
            at = (index * size, (index + 1) * size)
            yield WeightSlice(name, (experts, (low, high), columns), fc1, (local_experts, at, columns))
        yield WeightSlice(hf[-1], (experts, columns, (low, high)), fc2, (local_experts, columns, (0, size)))

    def attention(self, model: ModelConfig, hf: str, local: str) -> Iterator[WeightSlice]:
        """Yields grouped-query attention. `linear_qkv` holds this rank's rows of `[q.. q k v]`, group by group."""
        columns = (0, model.hidden)
        for letter, rows, at in self._query_groups(model, hf):
            yield WeightSlice(f"{hf}{letter}_proj.weight", (rows, columns), f"{local}linear_qkv.weight", (at, columns))
            if model.qkv_bias:
                yield WeightSlice(f"{hf}{letter}_proj.bias", (rows,), f"{local}linear_qkv.bias", (at,))
        width = model.heads * model.head_dim
        yield self.columns(f"{hf}o_proj.weight", f"{local}linear_proj.weight", model.hidden, width, "the heads' columns")
        if model.qk_norm:
            yield replicated(f"{hf}q_norm.weight", f"{local}q_layernorm.weight", model.head_dim)
            yield replicated(f"{hf}k_norm.weight", f"{local}k_layernorm.weight", model.head_dim)

    def _query_groups(self, model: ModelConfig, hf: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
        """Yields `(q | k | v, rows in the HF parameter, rows in the local linear_qkv)`.

        The rows of all groups are sharded evenly over tp. With fewer key-value heads than ranks, a rank holds part of a
        group.
        """
        tp, groups = self.layout.tp, model.kv_heads
        shard_range(model.heads, self.tp, f"{hf}q_proj.weight: the attention heads")
        if groups % tp and tp % groups:
            raise LayoutError(
                f"{hf}k_proj.weight: {groups} key-value heads and tp {tp}: one must divide the other; choose another tp"
            )
        size, queries = model.head_dim, model.heads // model.kv_heads * model.head_dim
        start, stop = shard_range(
            groups * (queries + 2 * size), self.tp, f"{hf}q_proj.weight: the rows of query, key and value"
        )
        for group in range(groups):
            at = group * (queries + 2 * size)
            for letter, length in (("q", queries), ("k", size), ("v", size)):
                low, high = max(at, start), min(at + length, stop)
                if low < high:
                    first = group * length + low - at
                    yield letter, (first, first + high - low), (low - start, high - start)
                at += length


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """Returns the rows of Megatron's embedding, a multiple of `VOCABULARY_MULTIPLE * tp`. Padding rows are 0."""
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocabulary // multiple) * multiple


def shard_range(size: int, parts: tuple[int, int], what: str, axis: str = "tp") -> tuple[int, int]:
    """Returns the range of shard `parts[1]` of `parts[0]` equal ones. Raises LayoutError if `size` does not divide."""
    count, index = parts
    if size % count:
        raise LayoutError(f"{what} ({size}) cannot be divided evenly by {axis} {count}; choose another {axis}")
    each = size // count
    return index * each, (index + 1) * each


def replicated(name: str, tensor: str, *shape: int, dtype: str = "") -> WeightSlice:
    """Returns a parameter that every rank holds whole."""
    box: Box = tuple((0, size) for size in shape)
    return WeightSlice(name, box, tensor, box, dtype)
