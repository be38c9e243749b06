"""What a vLLM rank will hold of a model, for plans and checks before an engine runs. A pure function.

A running engine reports what it holds: it records its own loader (`recording.py`). Tests prove for each family that both are
equal, box by box. Parameters are placed by the last parts of their Hugging Face names, as in vLLM 0.26 to 0.33:

- `QKVParallelLinear` holds `[Q; K; V]` of the rank's heads. With fewer key-value heads than ranks, ranks share one.
- `MergedColumnParallelLinear` holds `[gate; up]` of the rank's rows.
- `RowParallelLinear` holds a range of columns and the whole bias.
- `VocabParallelEmbedding` pads the vocabulary to 64, then divides it.
- Fused experts are `w13_weight [E, 2I, H]`, gate first, and `w2_weight [E, H, I]`. Without expert parallelism every expert
  is sharded over tp. With it each tp rank holds consecutive whole experts.
- Mamba's `in_proj` is `[z, x, B, C, dt]` of the rank's heads and groups. A single group is on every rank.
- Everything else is on every rank. GLM-4.5 has its router in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dagrl.config import Json
from dagrl.errors import LayoutError, RefitPlanError
from dagrl.refit.fp8 import BLOCK, FP8
from dagrl.refit.slices import STACKED, Box, Scales, WeightSlice
from dagrl.workers.families import find_family, mla
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.mamba import stack_rows, state_space_of
from dagrl.workers.megatron.weights import stacked_shapes

VOCABULARY_PADDING = 64
ROUTERS = ("gate", "shared_expert_gate")
MIXER = ("in_proj", "conv1d", "norm", "A_log", "D", "dt_bias")
FLOAT32 = ("A_log", "e_score_correction_bias")

Range = tuple[int, int]
Rows = list[tuple[Range, int]]
"""Ranges of a parameter's rows, each with its first row in the local tensor."""


@dataclass(frozen=True)
class VllmRank:
    """One rank of an engine with `tp` tensor-parallel ranks. Data-parallel replicas are separate engines.

    `fp8` quantizes every linear layer in blocks of 128x128 with float32 scales, except routers, embedding and head.
    """

    tp: int = 1
    tp_rank: int = 0
    expert_parallel: bool = False
    fp8: bool = False

    def part(self, size: int, what: str) -> Range:
        """Returns this rank's range of `size` items. Raises LayoutError if tp does not divide `size`."""
        if size % self.tp:
            raise LayoutError(f"tensor parallel size {self.tp} does not divide {what} ({size}); choose one that does")
        each = size // self.tp
        return self.tp_rank * each, (self.tp_rank + 1) * each


def vllm_weight_slices(hf_config: Mapping[str, Json], rank: VllmRank) -> list[WeightSlice]:
    """Returns every weight that `rank` holds. Tied embeddings are one tensor, described once.

    `hf_config` is the content of `config.json`. Local tensor names are vLLM's, as `features.local_name` returns them. Raises
    ConfigError for a family without rules, LayoutError if sizes do not divide, RefitPlanError if a slice of a fused FP8
    tensor starts inside a block.
    """
    shapes = {**stacked_shapes(hf_config), **_llama_biases(ModelConfig(hf_config))}
    return list(_Placement(hf_config, rank, shapes).slices())


class _Placement:
    def __init__(self, hf_config: Mapping[str, Json], rank: VllmRank, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._names, self._model = find_family(hf_config).names, ModelConfig(hf_config)
        self._rank, self._shapes = rank, shapes
        self._latent = mla.latent_of(self._model) if self._model.has("kv_lora_rank") else None

    def slices(self) -> Iterator[WeightSlice]:
        for name, shape in self._shapes.items():
            place = self._vocabulary if name in (self._names.embedding, self._names.head) else self._parameter
            try:
                yield from (self._experts if f".experts.{STACKED}." in name else place)(name, shape)
            except LayoutError as error:
                raise LayoutError(f"generation rank {self._rank.tp_rank}, {name}: {error}") from error

    def _vocabulary(self, name: str, shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        padded = -(-self._model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        start, stop = self._rank.part(padded, "the padded vocabulary")
        stop, columns = min(stop, self._model.vocabulary), (0, shape[1])
        if start < stop:
            yield WeightSlice(name, ((start, stop), columns), self._names.in_vllm(name), ((0, stop - start), columns))

    def _experts(self, name: str, shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        """Yields the rank's experts of a stack."""
        rank, (count, rows, columns) = self._rank, shape
        prefix, _, projection = name.removesuffix(".weight").rpartition(".")
        down = projection in ("down_proj", "w2")
        width = columns if down else rows
        part = (0, width) if rank.expert_parallel else rank.part(width, "the experts' intermediate size")
        size = part[1] - part[0]
        at = size if projection == "w3" or (projection == "up_proj" and f"{prefix}.gate_proj.weight" in self._shapes) else 0
        held, more = divmod(count, rank.tp if rank.expert_parallel else 1)
        number = rank.tp_rank if rank.expert_parallel else 0
        first = number * held + min(number, more)
        many = (first, first + held + (number < more))
        tensor = self._names.in_vllm(prefix.removesuffix(STACKED)) + ("w2_weight" if down else "w13_weight")
        box = (many, (0, rows), part) if down else (many, part, (0, columns))
        inner = ((0, rows), (0, size)) if down else ((at, at + size), (0, columns))
        if many[0] < many[1]:
            yield self._slice(name, box, tensor, ((0, many[1] - many[0]), *inner), quantized=True)

    def _parameter(self, name: str, shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            module, kind = name, ""
        path, _, leaf = module.rpartition(".")
        fused, rows = self._rows(path, leaf, shape[0])
        columns = (0, shape[1]) if len(shape) == 2 else (0, 0)
        if leaf in ("o_proj", "down_proj", "out_proj") and len(shape) == 2:
            columns = self._rank.part(shape[1], _width_of(path) if leaf == "down_proj" else "the heads' columns")
        tensor = self._names.in_vllm(f"{path}.{fused}.{kind}".rstrip("."))
        float32 = name.endswith(FLOAT32) or (leaf == "gate" and self._model.type == "glm4_moe")
        for part, at in rows:
            local = (at, at + part[1] - part[0])
            if len(shape) == 2 and not float32:
                target = (local, (0, columns[1] - columns[0]))
                yield self._slice(name, (part, columns), tensor, target, quantized=leaf not in ROUTERS)
            else:
                rest: Box = tuple((0, size) for size in shape[1:])
                yield WeightSlice(name, (part, *rest), tensor, (local, *rest), "float32" if float32 else "")

    def _rows(self, path: str, leaf: str, size: int) -> tuple[str, Rows]:
        """Returns vLLM's module for a Hugging Face module, and where the rank's rows are in it."""
        rank, latent, whole = self._rank, self._latent, [((0, size), 0)]
        if latent is not None:
            if leaf in ("q_proj", "q_b_proj", "kv_b_proj"):
                return leaf, [(_scaled(rank.part(self._model.heads, "the attention heads"), size // self._model.heads), 0)]
            if leaf in ("q_a_proj", "kv_a_proj_with_mqa") and latent.query:
                return "fused_qkv_a_proj", [((0, size), 0 if leaf == "q_a_proj" else latent.query)]
        elif leaf in ("q_proj", "k_proj", "v_proj"):
            return "qkv_proj", [self._heads(leaf)]
        if leaf in ("gate_proj", "up_proj"):
            part = rank.part(size, _width_of(path))
            if f"{path}.gate_proj.weight" not in self._shapes:
                return leaf, [(part, 0)]
            return "gate_up_proj", [(part, part[1] - part[0] if leaf == "up_proj" else 0)]
        return leaf, self._mixer(leaf) if path.endswith(".mixer") and leaf in MIXER else whole

    def _heads(self, leaf: str) -> tuple[Range, int]:
        """Returns the rows of q, k or v that this rank holds, and where `qkv_proj` has them."""
        rank, keys, dim = self._rank, self._model.kv_heads, self._model.head_dim
        start, stop = queries = rank.part(self._model.heads, "the attention heads")
        if keys < rank.tp and rank.tp % keys:
            raise LayoutError(
                f"tensor parallel size {rank.tp} is not a multiple of the {keys} key/value heads; choose one that is"
            )
        shared = rank.tp_rank * keys // rank.tp
        first, last = heads = rank.part(keys, "the key/value heads") if keys >= rank.tp else (shared, shared + 1)
        if leaf == "q_proj":
            return _scaled(queries, dim), 0
        return _scaled(heads, dim), (stop - start + (last - first if leaf == "v_proj" else 0)) * dim

    def _mixer(self, leaf: str) -> Rows:
        """Returns the rows of a Mamba mixer's parameter."""
        space = state_space_of(self._model)
        heads = self._rank.part(space.heads, "the mamba heads")
        inner = _scaled(heads, space.head_dim)
        groups = (0, 1) if space.groups == 1 else self._rank.part(space.groups, "the mamba groups")
        state = _scaled(groups, space.state)
        if leaf not in ("in_proj", "conv1d"):
            return [(inner if leaf == "norm" else heads, 0)]
        parts = (inner, inner, state, state, heads) if leaf == "in_proj" else (inner, state, state)
        return [(rows, at[0]) for rows, at in stack_rows(space, parts)]

    def _slice(self, name: str, box: Box, tensor: str, local: Box, quantized: bool) -> WeightSlice:
        """Returns a slice of a linear layer's weight; in FP8 with its scales."""
        if not (self._rank.fp8 and quantized):
            return WeightSlice(name, box, tensor, local)
        scales = Scales(f"{tensor}_scale_inv", (*local[:-2], *(_blocks(name, tensor, part) for part in local[-2:])))
        return WeightSlice(name, box, tensor, local, FP8, scales)


def _llama_biases(model: ModelConfig) -> dict[str, tuple[int]]:
    """Returns biases that Megatron's Llama does not have."""
    sizes = {"self_attn.o_proj": model.hidden} if model.qkv_bias else {}
    if model.flag("mlp_bias"):
        sizes |= {"mlp.gate_proj": model.ffn, "mlp.up_proj": model.ffn, "mlp.down_proj": model.hidden}
    layers = range(model.layers if model.type == "llama" else 0)
    return {f"model.layers.{layer}.{module}.bias": (size,) for layer in layers for module, size in sizes.items()}


def _width_of(path: str) -> str:
    return "the shared experts' size" if "shared_expert" in path else "the intermediate size"


def _scaled(part: Range, size: int) -> Range:
    return part[0] * size, part[1] * size


def _blocks(name: str, tensor: str, part: Range) -> Range:
    """Converts a row or column range to blocks. The last block may extend past the end of the parameter."""
    if part[0] % BLOCK:
        raise RefitPlanError(
            f"parameter {name!r} begins at {part[0]} in {tensor!r}, inside an FP8 block of {BLOCK}; choose a tensor "
            f"parallel size whose shards are multiples of {BLOCK}"
        )
    return part[0] // BLOCK, -(-part[1] // BLOCK)
