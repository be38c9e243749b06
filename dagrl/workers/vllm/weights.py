"""What a vLLM rank will hold of a model, for plans and checks before an engine runs. A pure function.

A running engine records its own loader instead (`dagrl.refit.recording`). These rules remain because `dagrl inspect` and the
checks before a start have no engine. Tests prove for each family that both are equal, box by box. Parameters are placed by
the last parts of their Hugging Face names, as in vLLM 0.26 to 0.33:

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
from dataclasses import dataclass, replace

from dagrl.config import Json
from dagrl.errors import LayoutError, RefitPlanError
from dagrl.refit.fp8 import BLOCK, FP8, SCALE_SUFFIX, in_blocks
from dagrl.refit.slices import STACKED, Box, Scales, WeightSlice
from dagrl.workers.families import find_family
from dagrl.workers.families.family import ParameterNames
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.mamba import stack_rows, state_space_of
from dagrl.workers.families.megatron import shard_range
from dagrl.workers.megatron.weights import stacked_shapes

VOCABULARY_PADDING = 64
VOCABULARY = ("embed_tokens", "embeddings", "lm_head")
UNQUANTIZED = (*VOCABULARY, "gate", "shared_expert_gate")
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "w13": ("w1", "w3"),
}
ROW_PARALLEL = ("o_proj", "out_proj", "down_proj", "w2")
MIXER = ("in_proj", "conv1d", "norm", "A_log", "D", "dt_bias")
FLOAT32 = ("A_log", "e_score_correction_bias")

Range = tuple[int, int]


@dataclass(frozen=True)
class VllmRank:
    """One rank of an engine with `tp` tensor-parallel ranks. Data-parallel replicas are separate engines.

    `fp8` quantizes every linear layer in blocks of 128x128 with float32 scales, except routers, embedding and head.
    """

    tp: int = 1
    tp_rank: int = 0
    expert_parallel: bool = False
    fp8: bool = False

    def part(self, count: int, what: str, rows: int = 1) -> Range:
        """Returns this rank's part of `count` items of so many rows. Raises LayoutError if tp does not divide `count`."""
        start, stop = shard_range(count, (self.tp, self.tp_rank), what)
        return start * rows, stop * rows


def vllm_weight_slices(hf_config: Mapping[str, Json], rank: VllmRank) -> list[WeightSlice]:
    """Returns every weight that `rank` holds. Tied embeddings are one tensor, described once.

    `hf_config` is the content of `config.json`. Local tensor names are vLLM's, as `features.local_name` returns them. Raises
    ConfigError for a family without rules, LayoutError if sizes do not divide, RefitPlanError if a slice of a fused FP8
    tensor starts inside a block.
    """
    model, shapes = ModelConfig(hf_config), stacked_shapes(hf_config)
    if model.type == "llama":  # Megatron's has no biases after attention and in the MLP
        biased = [part for part, has in ((".o_proj.", model.qkv_bias), (".mlp.", model.flag("mlp_bias"))) if has]
        names = [name for name in shapes if any(part in name for part in biased)]
        shapes |= {f"{name.removesuffix('weight')}bias": shapes[name][:1] for name in names}
    placement = _Placement(find_family(hf_config).names, model, rank, shapes)
    found: list[WeightSlice] = []
    for name, shape in shapes.items():
        try:
            found += placement.slices(name, shape)
        except LayoutError as error:
            raise LayoutError(f"generation rank {rank.tp_rank}, {name}: {error}") from error
    return found


@dataclass(frozen=True)
class _Placement:
    names: ParameterNames
    model: ModelConfig
    rank: VllmRank
    shapes: Mapping[str, tuple[int, ...]]

    def slices(self, name: str, shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            module, kind = name, ""
        path, _, leaf = module.rpartition(".")
        lead: Box = (self._experts(shape[0]),) if path.endswith(STACKED) else ()
        size, *others = shape[len(lead) :]
        fused, rows = self._rows(path, leaf, size)
        inner: Box = tuple((0, other) for other in others)
        if leaf in ROW_PARALLEL and inner:
            inner = (self._width(path, leaf, shape[-1]),)
        if lead:
            fused, kind = "w2_weight" if leaf in ROW_PARALLEL else "w13_weight", ""
        tensor = self.names.in_vllm(f"{path.removesuffix(f'.{STACKED}')}.{fused}.{kind}".strip("."))
        dtype = "float32" if name.endswith(FLOAT32) or (leaf == "gate" and self.model.type == "glm4_moe") else ""
        quantized = self.rank.fp8 and len(inner) == 1 and not dtype and leaf not in UNQUANTIZED
        for part, at in rows:
            box = (*lead, part, *inner)
            local = [(0, stop - start) for start, stop in box]
            local[len(lead)] = (at, at + part[1] - part[0])
            if all(start < stop for start, stop in box):
                found = WeightSlice(name, box, tensor, tuple(local), dtype)
                yield _in_fp8(found) if quantized else found

    def _experts(self, count: int) -> Range:
        """Returns which of a layer's experts this rank holds."""
        if not self.rank.expert_parallel:
            return 0, count
        at, (held, more) = self.rank.tp_rank, divmod(count, self.rank.tp)
        return at * held + min(at, more), (at + 1) * held + min(at + 1, more)

    def _rows(self, path: str, leaf: str, size: int) -> tuple[str, list[tuple[Range, int]]]:
        """Returns vLLM's module for a Hugging Face module, and the rank's rows, each with their first row in it."""
        if path.endswith(".mixer") and leaf in MIXER:
            return leaf, self._mixer(leaf)
        for fused, members in FUSED.items():
            sizes = [self.shapes.get(f"{path}.{member}.weight", (0, 0))[-2] for member in members]
            if leaf in members and all(sizes):
                before = [self._held(path, *member) for member in zip(members[: members.index(leaf)], sizes, strict=False)]
                return fused, [(self._held(path, leaf, size), sum(stop - start for start, stop in before))]
        return leaf, [(self._held(path, leaf, size), 0)]

    def _held(self, path: str, leaf: str, size: int) -> Range:
        """Returns which of a parameter's `size` rows this rank holds."""
        rank, model = self.rank, self.model
        if leaf in VOCABULARY:
            start, stop = rank.part(-(-size // VOCABULARY_PADDING) * VOCABULARY_PADDING, "the padded vocabulary")
            return start, min(stop, size)
        if leaf in ("q_proj", "q_b_proj", "kv_b_proj"):
            return rank.part(model.heads, "the attention heads", size // model.heads)
        if leaf in ("k_proj", "v_proj"):
            keys, shards = model.kv_heads, min(model.kv_heads, rank.tp)
            if rank.tp % shards:
                raise LayoutError(f"tp {rank.tp} is not a multiple of the {keys} key/value heads; choose one that is")
            return VllmRank(shards, rank.tp_rank * shards // rank.tp).part(keys, "the key/value heads", model.head_dim)
        return self._width(path, leaf, size) if leaf in ("gate_proj", "up_proj", "w1", "w3") else (0, size)

    def _width(self, path: str, leaf: str, size: int) -> Range:
        """Returns the rank's part of the width of attention, an MLP or experts. Expert parallelism keeps experts whole."""
        if path.endswith(STACKED) and self.rank.expert_parallel:
            return 0, size
        return self.rank.part(size, "the heads' columns" if leaf in ("o_proj", "out_proj") else "the intermediate size")

    def _mixer(self, leaf: str) -> list[tuple[Range, int]]:
        """Returns the rows of a Mamba mixer's parameter."""
        space, part = state_space_of(self.model), self.rank.part
        heads = part(space.heads, "the mamba heads")
        inner = part(space.heads, "the mamba heads", space.head_dim)
        state = (0, space.state) if space.groups == 1 else part(space.groups, "the mamba groups", space.state)
        stacks = {"in_proj": (inner, inner, state, state, heads), "conv1d": (inner, state, state)}
        if leaf not in stacks:
            return [(inner if leaf == "norm" else heads, 0)]
        return [(rows, at) for rows, (at, _) in stack_rows(space, stacks[leaf])]


def _in_fp8(one: WeightSlice) -> WeightSlice:
    """Returns a slice of a linear layer in FP8, with its scales. The last block may extend past the end of the parameter."""
    for start, _ in one.local[-2:]:
        if start % BLOCK:
            raise RefitPlanError(
                f"parameter {one.name!r} begins at {start} in {one.tensor!r}, inside an FP8 block of {BLOCK}; choose a "
                f"tensor parallel size whose shards are multiples of {BLOCK}"
            )
    return replace(one, dtype=FP8, scales=Scales(f"{one.tensor}{SCALE_SUFFIX}", in_blocks(one.local)))
