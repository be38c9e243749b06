"""Whole models and how Megatron-Core and vLLM split them, written in plain torch: the reference for weight layouts.

Every element of a model has a number of its own, so that any element that lands in a wrong place is seen. What is written
here is held to the real modules by `megatron_shapes.py` and `tests/integration/vllm_loads.py`.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from dagrl.errors import LayoutError, RefitPlanError
from dagrl.refit.fp8 import BLOCK, in_blocks
from dagrl.refit.slices import STACKED, Scales, WeightSlice, expand, stacked_name
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices

Config = dict[str, Any]
Weights = dict[str, Tensor]
Shapes = Iterator[tuple[str, tuple[int, ...]]]
DENSE = ("llama", "qwen2", "qwen3")
MOE = ("qwen3_moe", "mixtral", "glm4_moe")
LATENT = ("deepseek_v3",)
TYPES = (*DENSE, *MOE, *LATENT)
FLOAT32 = "e_score_correction_bias"


def model_config(model_type: str = "qwen3", **changes: Any) -> Config:
    config: Config = {"model_type": model_type, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 300}
    config["tie_word_embeddings"] = False
    if model_type == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
    if model_type == "mixtral":
        config["num_local_experts"] = 4
    if model_type in ("glm4_moe", *LATENT):
        config |= {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    if model_type == "glm4_moe":
        config |= {"use_qk_norm": True, "attention_bias": True}
    if model_type in LATENT:
        config |= {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 2}
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config | changes


@st.composite
def model_configs(draw: st.DrawFn) -> Config:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    model_type = draw(st.sampled_from(TYPES))
    config = model_config(model_type, num_hidden_layers=draw(st.sampled_from([1, 2, 3, 4])), num_key_value_heads=kv_heads)
    config |= {"hidden_size": 4 * draw(st.integers(1, 3)), "intermediate_size": 4 * draw(st.integers(1, 4))}
    config |= {"num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 4])), "head_dim": draw(st.sampled_from([2, 4]))}
    config |= {"vocab_size": draw(st.integers(1, 700)), "tie_word_embeddings": draw(st.booleans())}
    experts, width = draw(st.sampled_from([2, 4])), 4 * draw(st.integers(1, 3))
    if model_type == "qwen3_moe":
        sparse = {"decoder_sparse_step": draw(st.sampled_from([1, 2])), "mlp_only_layers": draw(st.sampled_from([[], [0]]))}
        config |= {"num_experts": experts, "moe_intermediate_size": width} | sparse
    if model_type == "mixtral":
        config["num_local_experts"] = experts
    if model_type == "glm4_moe":
        config |= {"n_routed_experts": experts, "moe_intermediate_size": width, "n_shared_experts": draw(st.integers(1, 2))}
        config |= {"first_k_dense_replace": draw(st.integers(0, 2)), "use_qk_norm": draw(st.booleans())}
    if model_type in LATENT:
        shared, latent = draw(st.sampled_from([None, 1, 2])), draw(st.sampled_from([None, 4, 8]))
        config |= {"n_routed_experts": experts, "moe_intermediate_size": width, "n_shared_experts": shared}
        config |= {"q_lora_rank": latent, "kv_lora_rank": draw(st.sampled_from([4, 12]))}
        config |= {"first_k_dense_replace": draw(st.integers(0, 2)), "num_key_value_heads": config["num_attention_heads"]}
    return config


@st.composite
def megatron_layouts(draw: st.DrawFn, config: Config, limit: int = 8) -> ParallelLayout:
    """A valid layout of at most `limit` ranks, with uneven pipelines among them."""
    choices = random.Random(draw(st.integers(0, 1 << 30)))  # noqa: S311
    has_experts = "expert" in str(config)
    for _ in range(60):
        tp, pp, dp, cp = (choices.choice(sizes) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2), (1, 2)))
        ep, etp = (choices.choice((1, 2, 4)), choices.choice((None, 1, 2))) if has_experts else (1, None)
        vpp = choices.choice((1, 1, 2))
        first, last = choices.choice((None, None, 1)), choices.choice((None, None, 1))
        if tp * pp * dp * cp > limit:
            continue
        try:
            sizes = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "etp": etp, "vpp": vpp}
            layout = ParallelLayout(**sizes, first_stage_layers=first, last_stage_layers=last)
            for stage in range(layout.pp):
                megatron_weight_slices(config, layout, stage * layout.stage_size)
        except LayoutError:
            continue
        return layout
    return ParallelLayout()


def vllm_sizes(config: Config) -> list[int]:
    """Tensor-parallel sizes up to 4 that vLLM can use."""
    sizes = []
    for tp in (1, 2, 4):
        try:
            vllm_weight_slices(config, VllmRank(tp))
        except LayoutError:
            continue
        sizes.append(tp)
    return sizes


def layer_kind(config: Config, layer: int) -> str:
    """Returns D (attention and MLP) or E (attention and experts)."""
    if config["model_type"] in (*LATENT, "glm4_moe"):
        return "E" if layer >= config["first_k_dense_replace"] else "D"
    if config["model_type"] not in MOE or layer in config.get("mlp_only_layers", []):
        return "D"
    return "E" if (layer + 1) % config.get("decoder_sparse_step", 1) == 0 else "D"


def hf_weights(config: Config) -> Weights:
    """A model with Hugging Face names. All elements are distinct integers, exact in float32."""
    weights: Weights = {}
    start = 1
    for name, shape in hf_shapes(config):
        count = torch.Size(shape).numel()
        weights[name] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        start += count
    return weights


def hf_shapes(config: Config) -> Shapes:
    vocabulary = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", vocabulary
    for layer in range(config["num_hidden_layers"]):
        yield from _layer_shapes(config, f"model.layers.{layer}.", layer)
    yield "model.norm.weight", (config["hidden_size"],)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", vocabulary


def _layer_shapes(c: Config, p: str, layer: int) -> Shapes:
    hidden, kind = c["hidden_size"], c["model_type"]
    yield f"{p}input_layernorm.weight", (hidden,)
    yield f"{p}post_attention_layernorm.weight", (hidden,)
    yield from _latent_shapes(c, f"{p}self_attn.") if kind in LATENT else _attention_shapes(c, f"{p}self_attn.")
    if layer_kind(c, layer) == "D":
        yield from _mlp_shapes(f"{p}mlp.", hidden, c["intermediate_size"])
        return
    block = f"{p}{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}."
    count = c.get("n_routed_experts") or c.get("num_experts") or c["num_local_experts"]
    yield f"{block}gate.weight", (count, hidden)
    width = c["intermediate_size"] if kind == "mixtral" else c["moe_intermediate_size"]
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for expert in range(count):
        yield from _mlp_shapes(f"{block}experts.{expert}.", hidden, width, names)
    if kind in ("deepseek_v3", "glm4_moe"):
        yield f"{block}gate.e_score_correction_bias", (count,)
    if kind in (*LATENT, "glm4_moe") and c["n_shared_experts"]:
        yield from _mlp_shapes(f"{block}shared_experts.", hidden, width * c["n_shared_experts"])


def _attention_shapes(c: Config, p: str) -> Shapes:
    hidden, dim = c["hidden_size"], c["head_dim"]
    for letter, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        yield f"{p}{letter}_proj.weight", (c[heads] * dim, hidden)
        if c["model_type"].startswith("qwen2") or c.get("attention_bias"):
            yield f"{p}{letter}_proj.bias", (c[heads] * dim,)
    yield f"{p}o_proj.weight", (hidden, c["num_attention_heads"] * dim)
    if c["model_type"].startswith("qwen3") or c.get("use_qk_norm"):
        yield f"{p}q_norm.weight", (dim,)
        yield f"{p}k_norm.weight", (dim,)


def _latent_shapes(c: Config, p: str) -> Shapes:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    rope, nope, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    if c["q_lora_rank"]:
        yield f"{p}q_a_proj.weight", (c["q_lora_rank"], hidden)
        yield f"{p}q_a_layernorm.weight", (c["q_lora_rank"],)
        yield f"{p}q_b_proj.weight", (heads * (nope + rope), c["q_lora_rank"])
    else:
        yield f"{p}q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{p}kv_a_proj_with_mqa.weight", (c["kv_lora_rank"] + rope, hidden)
    yield f"{p}kv_a_layernorm.weight", (c["kv_lora_rank"],)
    yield f"{p}kv_b_proj.weight", (heads * (nope + value), c["kv_lora_rank"])
    yield f"{p}o_proj.weight", (hidden, heads * value)


def _mlp_shapes(p: str, hidden: int, width: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    for name in names[:-1]:
        yield f"{p}{name}.weight", (width, hidden)
    yield f"{p}{names[-1]}.weight", (hidden, width)


def megatron_tensors(w: Weights, config: Config, layout: ParallelLayout, rank: int) -> Weights:
    """Returns Megatron-Core's parameters and router bias on `rank`. Padding rows are 0, up to multiples of 128."""
    return _Megatron(w, config, layout, rank).tensors()


class _Megatron:
    def __init__(self, w: Weights, config: Config, layout: ParallelLayout, rank: int) -> None:
        self.w, self.c, self.layout = w, config, layout
        # tp-cp-ep-dp-pp with tp fastest; experts have the same stage, cut as etp-ep-edp
        stage_size = layout.tp * layout.cp * layout.dp
        inside, self.pp = rank % stage_size, rank // stage_size
        self.etp = layout.tp if layout.etp is None else layout.etp
        self.tp_rank, self.etp_rank, self.ep_rank = inside % layout.tp, inside % self.etp, inside // self.etp % layout.ep
        self.out: Weights = {}

    def cut(self, weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(self.layout.tp, dim)[self.tp_rank]

    def padded(self, weight: Tensor) -> Tensor:
        multiple = 128 * self.layout.tp
        return self.cut(pad_to(weight, -(-len(weight) // multiple) * multiple))

    def tensors(self) -> Weights:
        c, tied = self.c, self.c["tie_word_embeddings"]
        chunks, embedding = stage_chunks(c["num_hidden_layers"], self.layout), self.w["model.embed_tokens.weight"]
        for vp in range(self.layout.vpp):
            prefix = f"vp{vp}." if self.layout.vpp > 1 else ""
            chunk = vp * self.layout.pp + self.pp
            if chunk == 0:
                self.out[f"{prefix}embedding.word_embeddings.weight"] = self.padded(embedding)
            for index, number in enumerate(chunks[chunk]):
                self.layer(number, f"{prefix}decoder.layers.{index}.")
            if chunk == len(chunks) - 1:
                self.out[f"{prefix}decoder.final_layernorm.weight"] = self.w["model.norm.weight"]
                if not tied or chunk > 0:
                    head = embedding if tied else self.w["lm_head.weight"]
                    self.out[f"{prefix}output_layer.weight"] = self.padded(head)
        return self.out

    def layer(self, number: int, to: str) -> None:
        kind = layer_kind(self.c, number)
        p, mla = f"model.layers.{number}.", self.c["model_type"] in LATENT
        block = f"{p}{'block_sparse_moe' if self.c['model_type'] == 'mixtral' else 'mlp'}."
        self.out[f"{to}input_layernorm.weight"] = self.w[f"{p}input_layernorm.weight"]
        self.out[f"{to}pre_mlp_layernorm.weight"] = self.w[f"{p}post_attention_layernorm.weight"]
        (self.latent if mla else self.attention)(f"{p}self_attn.", f"{to}self_attention.")
        if kind == "D":
            self.mlp(block, f"{to}mlp.")
        else:
            self.experts(block, f"{to}mlp.")

    def attention(self, p: str, to: str) -> None:
        for kind in ("weight", "bias"):
            if f"{p}q_proj.{kind}" in self.w:
                parts = [self.w[f"{p}{letter}_proj.{kind}"] for letter in "qkv"]
                groups = [part.reshape(self.c["num_key_value_heads"], -1, *part.shape[1:]) for part in parts]
                self.out[f"{to}linear_qkv.{kind}"] = self.cut(torch.cat(groups, 1).flatten(0, 1))
        self.out[f"{to}linear_proj.weight"] = self.cut(self.w[f"{p}o_proj.weight"], 1)
        for letter in "qk":
            if f"{p}{letter}_norm.weight" in self.w:
                self.out[f"{to}{letter}_layernorm.weight"] = self.w[f"{p}{letter}_norm.weight"]

    def latent(self, p: str, to: str) -> None:
        if self.c["q_lora_rank"]:
            self.out[f"{to}linear_q_down_proj.weight"] = self.cut(self.w[f"{p}q_a_proj.weight"])
            self.out[f"{to}q_layernorm.weight"] = self.w[f"{p}q_a_layernorm.weight"]
            self.out[f"{to}linear_q_up_proj.weight"] = self.cut(self.w[f"{p}q_b_proj.weight"])
        else:
            self.out[f"{to}linear_q_proj.weight"] = self.cut(self.w[f"{p}q_proj.weight"])
        self.out[f"{to}linear_kv_down_proj.weight"] = self.cut(self.w[f"{p}kv_a_proj_with_mqa.weight"])
        self.out[f"{to}kv_layernorm.weight"] = self.w[f"{p}kv_a_layernorm.weight"]
        self.out[f"{to}linear_kv_up_proj.weight"] = self.cut(self.w[f"{p}kv_b_proj.weight"])
        self.out[f"{to}linear_proj.weight"] = self.cut(self.w[f"{p}o_proj.weight"], 1)

    def mlp(self, p: str, to: str) -> None:
        halves = [self.cut(self.w[f"{p}{name}.weight"]) for name in ("gate_proj", "up_proj")]
        self.out[f"{to}linear_fc1.weight"] = torch.cat(halves)
        self.out[f"{to}linear_fc2.weight"] = self.cut(self.w[f"{p}down_proj.weight"], 1)

    def experts(self, p: str, to: str) -> None:
        mixtral = self.c["model_type"] == "mixtral"
        router = self.w[f"{p}gate.weight"]
        self.out[f"{to}router.weight"] = router
        if f"{p}gate.e_score_correction_bias" in self.w:
            self.out[f"{to}router.expert_bias"] = self.w[f"{p}gate.e_score_correction_bias"]
        up = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
        local = len(router) // self.layout.ep
        for index in range(local):
            source = f"{p}experts.{self.ep_rank * local + index}."
            parts = [self.w[f"{source}{name}.weight"].chunk(self.etp)[self.etp_rank] for name in up]
            down = self.w[f"{source}{'w2' if mixtral else 'down_proj'}.weight"].chunk(self.etp, 1)[self.etp_rank]
            for fc, value in ((1, torch.cat(parts)), (2, down)):
                self.out[f"{to}experts.local_experts.{index}.linear_fc{fc}.weight"] = value
        if f"{p}shared_experts.up_proj.weight" in self.w:
            self.mlp(f"{p}shared_experts.", f"{to}shared_experts.")


def stage_chunks(layers: int, layout: ParallelLayout) -> list[list[int]]:
    """The layers of each chunk, in the order of the model: `vpp` rounds over the pipeline's ranks."""
    ends = {0: layout.first_stage_layers, layout.pp - 1: layout.last_stage_layers}
    given = {stage: count for stage, count in ends.items() if count is not None}
    middle = (layers - sum(given.values())) // max(layout.pp - len(given), 1)
    sizes = [given.get(stage, middle) for stage in range(layout.pp)]
    numbers = iter(range(layers))
    return [[next(numbers) for _ in range(size // layout.vpp)] for _ in range(layout.vpp) for size in sizes]


@dataclass(frozen=True)
class VllmRank:
    """One rank of an engine with `tp` tensor-parallel ranks; `fp8`: linear layers are in blockwise FP8."""

    tp: int = 1
    tp_rank: int = 0
    expert_parallel: bool = False
    fp8: bool = False


def vllm_tensors(w: Weights, config: Config, tp: int, rank: int, expert_parallel: bool = False) -> Weights:
    """Returns vLLM's tensors on tensor-parallel `rank`. Padding rows are 0."""
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in w.items():
        stacks.setdefault(stacked_name(name)[0] if ".experts." in name else name, []).append(tensor)
    whole = {name: torch.stack(parts) if STACKED in name else parts[0] for name, parts in stacks.items()}
    loads = _Vllm(whole, config, VllmRank(tp, rank, expert_parallel)).loads()
    return {target: pad_to(torch.cat(parts, dim), rows) for target, dim, parts, rows in loads}


def vllm_weight_slices(config: Config, rank: VllmRank) -> list[WeightSlice]:
    """The slices of the same model. Raises LayoutError if sizes do not divide."""
    names = [(stacked_name(name)[0] if ".experts." in name else name, shape) for name, shape in hf_shapes(config)]
    count = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    shapes = {name: (count, *shape) if STACKED in name else shape for name, shape in names}
    whole = {name: torch.empty(shape, dtype=_dtype(name, config), device="meta") for name, shape in shapes.items()}
    source = {id(tensor): name for name, tensor in whole.items()}
    slices = []
    for target, dim, parts, _ in _Vllm(whole, config, rank).loads():
        start = 0
        for part in parts:
            name = source[id(part if part._base is None else part._base)]
            first = np.unravel_index(part.storage_offset(), shapes[name]) if part.numel() else (0,) * part.dim()
            box = tuple((int(at), int(at) + size) for at, size in zip(first, part.shape, strict=True))
            local = tuple((start, start + size) if axis == dim else (0, size) for axis, size in enumerate(part.shape))
            if part.numel():
                slices.append(WeightSlice(name, box, target, local, "float32" if part.dtype == torch.float32 else ""))
            start += part.shape[dim]
    return [_in_fp8(one) for one in slices] if rank.fp8 else slices


def _dtype(name: str, config: Config) -> torch.dtype:
    router = name.endswith("mlp.gate.weight") and config["model_type"] == "glm4_moe"
    return torch.float32 if router or name.endswith(FLOAT32) else torch.bfloat16


def _in_fp8(one: WeightSlice) -> WeightSlice:
    plain = one.name.removesuffix(".weight").endswith((".gate", "embed_tokens", "lm_head"))
    if one.dtype or plain or len(one.box) != (3 if STACKED in one.name else 2):
        return one
    if any(start % BLOCK for start, _ in one.local[-2:]):
        raise RefitPlanError(f"{one.name} begins inside an FP8 block")
    return replace(one, dtype="float8_e4m3fn", scales=Scales(f"{one.tensor}_scale_inv", in_blocks(one.local)))


class _Vllm:
    """`loads` yields each tensor, its parts of the checkpoint along a dimension, and its padded rows (0: no padding)."""

    def __init__(self, w: Weights, config: Config, rank: VllmRank) -> None:
        self.w, self.c, self.tp, self.rank, self.ep = w, config, rank.tp, rank.tp_rank, rank.expert_parallel

    def cut(self, weight: Tensor, dim: int = 0) -> Tensor:
        if weight.shape[dim] % self.tp:
            raise LayoutError(f"{tuple(weight.shape)} is not divisible by {self.tp}")
        return weight.chunk(self.tp, dim)[self.rank]

    def loads(self) -> Iterator[tuple[str, int, list[Tensor], int]]:
        if self.c["num_attention_heads"] % self.tp:
            raise LayoutError("heads")
        for name, weight in self.w.items():
            made = self.fused(name, weight)
            if made is not None:
                target, parts, rows = made
                yield target, 0, parts, rows
        for layer in range(self.c["num_hidden_layers"]):
            if layer_kind(self.c, layer) == "E":
                yield from self.experts(layer)

    def fused(self, name: str, weight: Tensor) -> tuple[str, list[Tensor], int] | None:
        """The merged tensor whose first part is the parameter `name`; None for later parts and experts."""
        skipped = ("k_proj", "v_proj", "kv_a_proj_with_mqa" if self.c.get("q_lora_rank") else "-")
        if ".experts." in name or any(part in name for part in skipped) or ".up_proj" in name:
            return None
        if name.startswith(("model.embed", "lm_head")):
            rows = -(-len(weight) // 64) * 64 // self.tp
            return name, [weight[self.rank * rows : (self.rank + 1) * rows]], rows
        if ".q_proj." in name and self.c["model_type"] not in LATENT:
            k, v = (self.heads(self.w[name.replace(".q_proj.", f".{letter}_proj.")]) for letter in "kv")
            return name.replace(".q_proj.", ".qkv_proj."), [self.cut(weight), k, v], 0
        if ".gate_proj." in name:
            up = self.cut(self.w[name.replace("gate_proj", "up_proj")])
            return name.replace("gate_proj", "gate_up_proj"), [self.cut(weight), up], 0
        if ".q_a_proj." in name:
            other = self.w[name.replace("q_a_proj", "kv_a_proj_with_mqa")]
            return name.replace("q_a_proj", "fused_qkv_a_proj"), [weight, other], 0
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return name, [self.cut(weight, 1)], 0
        rows = (".q_proj.", ".q_b_proj.", ".kv_b_proj.")
        return name, [self.cut(weight) if any(part in name for part in rows) else weight], 0

    def heads(self, weight: Tensor) -> Tensor:
        count = self.c["num_key_value_heads"]
        if count % self.tp == 0:
            return self.cut(weight)
        if self.tp % count:
            raise LayoutError("key-value heads")
        return weight.view(count, self.c["head_dim"], *weight.shape[1:])[self.rank * count // self.tp]

    def experts(self, layer: int) -> Iterator[tuple[str, int, list[Tensor], int]]:
        kind = self.c["model_type"]
        prefix = f"model.layers.{layer}.{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}."
        parts, down = (("w1", "w3"), "w2") if kind == "mixtral" else (("gate_proj", "up_proj"), "down_proj")
        to = f"{prefix}experts."
        up = [self.expert_cut(self.w[f"{prefix}experts.*.{part}.weight"], 1) for part in parts]
        if len(up[0]):
            yield f"{to}w13_weight", 1, up, 0
            yield f"{to}w2_weight", 1, [self.expert_cut(self.w[f"{prefix}experts.*.{down}.weight"], 2)], 0

    def expert_cut(self, weight: Tensor, dim: int) -> Tensor:
        return weight.tensor_split(self.tp)[self.rank] if self.ep else self.cut(weight, dim)


def pad_to(weight: Tensor, rows: int) -> Tensor:
    return torch.cat([weight, weight.new_zeros(rows - len(weight), *weight.shape[1:])]) if rows > len(weight) else weight


def zeros_like(tensors: Weights, dtype: torch.dtype = torch.float32) -> Weights:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in tensors.items()}


def filled(weights: Weights, slices: list[WeightSlice], like: Weights) -> Weights:
    """Tensors shaped like `like`, filled from `weights` as the slices say, otherwise 0."""
    built = zeros_like(like)
    for held in expand(slices):
        target = built[held.tensor][tuple(slice(a, b) for a, b in held.local)]
        target.copy_(weights[held.name][tuple(slice(a, b) for a, b in held.box)].view(target.shape))
    return built


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
