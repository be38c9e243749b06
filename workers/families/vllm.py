"""vLLM's layout rules that families share: a rank's coordinates, and how vLLM shards and fuses a parameter.

Rules as in vLLM 0.26 to 0.33:
- `QKVParallelLinear` holds `[Q; K; V]` of the rank's heads. With fewer key-value heads than ranks, ranks share one.
- `MergedColumnParallelLinear` holds `[gate; up]` of the rank's rows, `RowParallelLinear` a range of columns
  (layers/linear.py).
- `VocabParallelEmbedding` pads the vocabulary to 64, then divides it (layers/vocab_parallel_embedding.py).
- Fused experts are `w13_weight [E, 2I, H]`, gate first, and `w2_weight [E, H, I]` (layers/fused_moe). Without expert
  parallelism every expert is sharded over tp. With it each tp rank holds whole experts: consecutive ones
  (`determine_expert_map`, linear placement), or those that a live engine reports.

Data-parallel replicas are separate engines and share no experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.errors import LayoutError, RefitPlanError
from dagrl.refit.fp8 import BLOCK, FP8
from dagrl.refit.slices import Box, Scales, WeightSlice
from dagrl.workers.families.hf_config import ModelConfig


@dataclass(frozen=True)
class VllmRank:
    """One rank of an engine with `tp` tensor-parallel ranks, with methods that give its slices.

    `fp8` quantizes every linear layer in blocks of 128x128 with float32 scales, except routers, embedding and head.
    `placement` lists the experts held with `expert_parallel`, in the order of the local tensors; None: linear placement.
    """

    tp: int = 1
    tp_rank: int = 0
    expert_parallel: bool = False
    fp8: bool = False
    placement: tuple[int, ...] | None = None

    def part(self, size: int, what: str) -> tuple[int, int]:
        """Returns this rank's range of `size` items. Raises LayoutError if tp does not divide `size`."""
        return _divide(size, self.tp, self.tp_rank, what)

    def held_experts(self, count: int) -> list[tuple[int, int]]:
        """Returns the experts that this rank holds, as ranges, in the order of the local tensors."""
        if not self.expert_parallel:
            return [(0, count)]
        if self.placement is not None:
            return list(_runs(self.placement))
        base, more = divmod(count, self.tp)
        first = self.tp_rank * base + min(self.tp_rank, more)
        stop = first + base + (self.tp_rank < more)
        return [(first, stop)] if first < stop else []

    def expert_part(self, width: int, what: str) -> tuple[int, int]:
        """Returns this rank's range of each expert's intermediate size."""
        return (0, width) if self.expert_parallel else self.part(width, what)

    def stacked(
        self,
        name: str,
        module: str,
        rows: tuple[int, int],
        at: int,
        columns: int,
        *,
        bias: str = "",
        quantized: bool = True,
    ) -> Iterator[WeightSlice]:
        """Yields `rows` of `{name}.weight` and of its bias, placed from row `at` on in a fused tensor."""
        local = (at, at + rows[1] - rows[0])
        yield self.matrix(f"{name}.weight", (rows, (0, columns)), f"{module}.weight", (local, (0, columns)), quantized)
        if bias:
            yield WeightSlice(f"{name}.{bias}", (rows,), f"{module}.{bias}", (local,))

    def row_parallel(
        self, name: str, module: str, rows: int, columns: tuple[int, int], bias: str = ""
    ) -> Iterator[WeightSlice]:
        """Yields columns of a row-parallel weight. Every rank holds the whole bias."""
        local = ((0, rows), (0, columns[1] - columns[0]))
        yield self.matrix(f"{name}.weight", ((0, rows), columns), f"{module}.weight", local)
        if bias:
            yield replicated(f"{name}.{bias}", rows, tensor=f"{module}.{bias}")

    def matrix(self, name: str, box: Box, tensor: str, local: Box, quantized: bool = True) -> WeightSlice:
        """Returns a slice of a linear layer's weight; in FP8 with its scales."""
        if not (self.fp8 and quantized):
            return WeightSlice(name, box, tensor, local)
        lead = local[:-2]
        scales = Scales(f"{tensor}_scale_inv", (*lead, *(_blocks(name, tensor, part) for part in local[-2:])))
        return WeightSlice(name, box, tensor, local, FP8, scales)

    def attention(self, model: ModelConfig, hf: str, local: str, *, output_bias: bool = False) -> Iterator[WeightSlice]:
        """Yields grouped-query attention. `qkv_proj` is `[Q; K; V]` of the rank's heads."""
        at, bias = 0, "bias" if model.qkv_bias else ""
        for projection, rows in self._heads(model):
            yield from self.stacked(f"{hf}{projection}", f"{local}qkv_proj", rows, at, model.hidden, bias=bias)
            at += rows[1] - rows[0]
        columns = self.part(model.heads * model.head_dim, "the query heads' columns")
        output = "bias" if output_bias else ""
        yield from self.row_parallel(f"{hf}o_proj", f"{local}o_proj", model.hidden, columns, output)
        if model.qk_norm:
            yield replicated(f"{hf}q_norm.weight", model.head_dim, tensor=f"{local}q_norm.weight")
            yield replicated(f"{hf}k_norm.weight", model.head_dim, tensor=f"{local}k_norm.weight")

    def _heads(self, model: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yields the rows of q, k and v that this rank holds."""
        queries, keys, dim = self.part(model.heads, "the attention heads"), model.kv_heads, model.head_dim
        if keys >= self.tp:
            heads = self.part(keys, "the key/value heads")
        elif self.tp % keys == 0:
            replica = self.tp_rank // (self.tp // keys)
            heads = (replica, replica + 1)
        else:
            raise LayoutError(
                f"tensor parallel size {self.tp} is not a multiple of the {keys} key/value heads; choose one that is"
            )
        for projection, (start, stop) in (("q_proj", queries), ("k_proj", heads), ("v_proj", heads)):
            yield projection, (start * dim, stop * dim)

    def gated_mlp(
        self, hf: str, local: str, hidden: int, width: int, bias: str = "", what: str = "the intermediate size"
    ) -> Iterator[WeightSlice]:
        """Yields an MLP whose `gate_up_proj` is `[gate; up]` of the rank's rows."""
        start, stop = part = self.part(width, what)
        for index, projection in enumerate(("gate_proj", "up_proj")):
            at = index * (stop - start)
            yield from self.stacked(f"{hf}{projection}", f"{local}gate_up_proj", part, at, hidden, bias=bias)
        yield from self.row_parallel(f"{hf}down_proj", f"{local}down_proj", hidden, part, bias)

    def experts(self, hf: tuple[str, ...], local: str, count: int, hidden: int, width: int) -> Iterator[WeightSlice]:
        """Yields fused experts. `hf` names the stacks of gate, up and down, or up and down."""
        start, end = part = self.expert_part(width, "the experts' intermediate size")
        columns, size, offset = (0, hidden), end - start, 0
        for many in self.held_experts(count):
            own = (offset, offset + many[1] - many[0])
            offset = own[1]
            for index, name in enumerate(hf[:-1]):
                at = (index * size, (index + 1) * size)
                yield self.matrix(name, (many, part, columns), f"{local}w13_weight", (own, at, columns))
            yield self.matrix(hf[-1], (many, columns, part), f"{local}w2_weight", (own, columns, (0, size)))


def replicated(name: str, *shape: int, tensor: str = "", dtype: str = "") -> WeightSlice:
    """Returns a parameter that every rank holds whole, under its own name unless `tensor` is given."""
    box: Box = tuple((0, size) for size in shape)
    return WeightSlice(name, box, tensor or name, box, dtype)


def _runs(numbers: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields the runs of consecutive numbers. Example: `_runs((0, 1, 4, 2, 3))` gives (0, 2), (4, 5), (2, 4)."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[start], numbers[index - 1] + 1
            start = index


def _divide(size: int, parts: int, index: int, what: str) -> tuple[int, int]:
    if size % parts:
        raise LayoutError(f"tensor parallel size {parts} does not divide {what} ({size}); choose one that does")
    each = size // parts
    return index * each, (index + 1) * each


def _blocks(name: str, tensor: str, part: tuple[int, int]) -> tuple[int, int]:
    """Converts a row or column range to blocks. The last block may extend past the end of the parameter."""
    if part[0] % BLOCK:
        raise RefitPlanError(
            f"parameter {name!r} begins at {part[0]} in {tensor!r}, inside an FP8 block of {BLOCK}; choose a tensor "
            f"parallel size whose shards are multiples of {BLOCK}"
        )
    return part[0] // BLOCK, -(-part[1] // BLOCK)
