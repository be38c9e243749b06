"""Whole models and how Megatron-Core and vLLM cut them, written with torch alone: the truth that weight layouts are held to.

Every element of a model has a number of its own, so that any element that lands in a wrong place is seen.
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st
from torch import Tensor

from dagrl.errors import LayoutError
from dagrl.layout import ParallelLayout
from dagrl.refit.slices import WeightSlice
from workers.megatron.architecture import check_layout

Config = dict[str, object]
TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def model_config(model_type: str = "qwen3", **changes: object) -> Config:
    config: Config = {
        "model_type": model_type,
        "hidden_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": 300,
        "tie_word_embeddings": False,
    }
    if model_type == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
    return config | changes


@st.composite
def model_configs(draw: st.DrawFn) -> Config:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    model_type = draw(st.sampled_from(TYPES))
    config = model_config(
        model_type,
        hidden_size=4 * draw(st.integers(1, 3)),
        num_hidden_layers=draw(st.sampled_from([1, 2, 4])),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([2, 4])),
        intermediate_size=4 * draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(1, 700)),
        tie_word_embeddings=draw(st.booleans()),
    )
    if model_type == "qwen3_moe":
        config["num_experts"] = draw(st.sampled_from([2, 4]))
        config["moe_intermediate_size"] = 4 * draw(st.integers(1, 3))
        config["decoder_sparse_step"] = draw(st.sampled_from([1, 2]))
        config["mlp_only_layers"] = draw(st.sampled_from([[], [0]]))
    return config


def megatron_layouts(config: Config, limit: int = 8) -> list[ParallelLayout]:
    """All layouts of at most `limit` ranks that fit."""
    layouts = []
    for tp, pp, dp, cp, ep, etp, vpp in itertools.product(
        (1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (None, 1, 2), (1, 2)
    ):
        try:
            layout = ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=vpp)
            check_layout(config, layout)  # type: ignore[arg-type]
        except LayoutError:
            continue
        if layout.world_size <= limit:
            layouts.append(layout)
    return layouts


def is_moe(config: Config, layer: int) -> bool:
    if config["model_type"] != "qwen3_moe" or layer in config.get("mlp_only_layers", []):  # type: ignore[operator]
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0  # type: ignore[operator, no-any-return]


def hf_weights(config: Config) -> dict[str, Tensor]:
    """A model under its Hugging Face names; all elements are different whole numbers (exact in float32)."""
    used = 0

    def numbered(*shape: int) -> Tensor:
        nonlocal used
        start, used = used + 1, used + torch.Size(shape).numel()
        return torch.arange(start, used + 1, dtype=torch.float32).view(shape)

    c = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, dim = c["hidden_size"], c["head_dim"]
    weights = {"model.embed_tokens.weight": numbered(c["vocab_size"], hidden)}

    def mlp(prefix: str, width: int) -> None:
        weights[f"{prefix}gate_proj.weight"] = numbered(width, hidden)
        weights[f"{prefix}up_proj.weight"] = numbered(width, hidden)
        weights[f"{prefix}down_proj.weight"] = numbered(hidden, width)

    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        weights[f"{p}input_layernorm.weight"] = numbered(hidden)
        weights[f"{p}post_attention_layernorm.weight"] = numbered(hidden)
        for letter, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            weights[f"{p}self_attn.{letter}_proj.weight"] = numbered(c[heads] * dim, hidden)
            if config["model_type"] == "qwen2":
                weights[f"{p}self_attn.{letter}_proj.bias"] = numbered(c[heads] * dim)
        weights[f"{p}self_attn.o_proj.weight"] = numbered(hidden, c["num_attention_heads"] * dim)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            weights[f"{p}self_attn.q_norm.weight"] = numbered(dim)
            weights[f"{p}self_attn.k_norm.weight"] = numbered(dim)
        if is_moe(config, layer):
            weights[f"{p}mlp.gate.weight"] = numbered(c["num_experts"], hidden)
            for expert in range(c["num_experts"]):
                mlp(f"{p}mlp.experts.{expert}.", c["moe_intermediate_size"])
        else:
            mlp(f"{p}mlp.", c["intermediate_size"])
    weights["model.norm.weight"] = numbered(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = numbered(c["vocab_size"], hidden)
    return weights


def pad_rows(weight: Tensor, multiple: int) -> Tensor:
    rows = -(-len(weight) // multiple) * multiple
    return torch.cat([weight, weight.new_zeros(rows - len(weight), *weight.shape[1:])])


def megatron_tensors(w: dict[str, Tensor], config: Config, layout: ParallelLayout, rank: int) -> dict[str, Tensor]:
    """What Megatron-Core's `named_parameters()` hold on `rank`, padding rows 0 (multiples of 128 rows a rank)."""
    c = {key: value for key, value in config.items() if isinstance(value, int)}
    tp, etp = layout.tp, layout.tp if layout.etp is None else layout.etp
    # tp-cp-ep-dp-pp with tp fastest; experts have the same stage, cut as etp-ep-edp
    stage_rank, pp_rank = rank % (tp * layout.cp * layout.dp), rank // (tp * layout.cp * layout.dp)
    tp_rank, etp_rank, ep_rank = stage_rank % tp, stage_rank % etp, stage_rank // etp % layout.ep
    out: dict[str, Tensor] = {}

    def qkv(prefix: str, kind: str) -> Tensor:
        parts = [w[f"{prefix}{letter}_proj.{kind}"] for letter in "qkv"]
        groups = [part.reshape(c["num_key_value_heads"], -1, *part.shape[1:]) for part in parts]
        return torch.cat(groups, 1).flatten(0, 1).chunk(tp)[tp_rank]

    def mlp(source: str, target: str, size: int, index: int) -> None:
        gate, up = (w[f"{source}{half}_proj.weight"].chunk(size)[index] for half in ("gate", "up"))
        out[f"{target}linear_fc1.weight"] = torch.cat([gate, up])
        out[f"{target}linear_fc2.weight"] = w[f"{source}down_proj.weight"].chunk(size, 1)[index]

    def layer(source: str, target: str, moe: bool) -> None:
        out[f"{target}input_layernorm.weight"] = w[f"{source}input_layernorm.weight"]
        out[f"{target}pre_mlp_layernorm.weight"] = w[f"{source}post_attention_layernorm.weight"]
        attention = f"{target}self_attention."
        out[f"{attention}linear_qkv.weight"] = qkv(f"{source}self_attn.", "weight")
        if config["model_type"] == "qwen2":
            out[f"{attention}linear_qkv.bias"] = qkv(f"{source}self_attn.", "bias")
        out[f"{attention}linear_proj.weight"] = w[f"{source}self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            out[f"{attention}q_layernorm.weight"] = w[f"{source}self_attn.q_norm.weight"]
            out[f"{attention}k_layernorm.weight"] = w[f"{source}self_attn.k_norm.weight"]
        if not moe:
            mlp(f"{source}mlp.", f"{target}mlp.", tp, tp_rank)
            return
        out[f"{target}mlp.router.weight"] = w[f"{source}mlp.gate.weight"]
        local = c["num_experts"] // layout.ep
        for expert in range(local):
            to = f"{target}mlp.experts.local_experts.{expert}."
            mlp(f"{source}mlp.experts.{ep_rank * local + expert}.", to, etp, etp_rank)

    chunks = torch.arange(c["num_hidden_layers"]).chunk(layout.pp * layout.vpp)  # dealt to the ranks in turn
    for vp in range(layout.vpp):
        prefix = f"vp{vp}." if layout.vpp > 1 else ""
        chunk = vp * layout.pp + pp_rank
        if chunk == 0:
            embedding = pad_rows(w["model.embed_tokens.weight"], 128 * tp).chunk(tp)[tp_rank]
            out[f"{prefix}embedding.word_embeddings.weight"] = embedding
        for local_index, number in enumerate(chunks[chunk].tolist()):
            layer(f"model.layers.{number}.", f"{prefix}decoder.layers.{local_index}.", is_moe(config, number))
        if chunk == layout.pp * layout.vpp - 1:
            out[f"{prefix}decoder.final_layernorm.weight"] = w["model.norm.weight"]
            if not config["tie_word_embeddings"]:
                out[f"{prefix}output_layer.weight"] = pad_rows(w["lm_head.weight"], 128 * tp).chunk(tp)[tp_rank]
            elif chunk > 0:
                head = pad_rows(w["model.embed_tokens.weight"], 128 * tp).chunk(tp)[tp_rank]
                out[f"{prefix}output_layer.weight"] = head
    return out


def vllm_tensors(w: dict[str, Tensor], config: Config, tp: int, rank: int) -> dict[str, Tensor]:
    """What vLLM's model holds on tensor-parallel `rank`, padding rows 0."""
    kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
    assert isinstance(kv_heads, int) and isinstance(dim, int)
    out: dict[str, Tensor] = {}

    def heads(weight: Tensor) -> Tensor:
        if kv_heads >= tp:
            return weight.chunk(tp)[rank]
        return weight.view(kv_heads, dim, *weight.shape[1:])[rank * kv_heads // tp]

    for name, weight in w.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            out[name] = pad_rows(weight, 64).chunk(tp)[rank]
        elif ".q_proj." in name:
            k, v = (heads(w[name.replace(".q_proj.", f".{letter}_proj.")]) for letter in "kv")
            out[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat([weight.chunk(tp)[rank], k, v])
        elif ".experts." in name:
            continue
        elif name.endswith("gate_proj.weight"):
            up = w[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat([weight.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            out[name] = weight.chunk(tp, 1)[rank]
        elif not name.endswith((".k_proj.weight", ".v_proj.weight", ".up_proj.weight", ".k_proj.bias", ".v_proj.bias")):
            out[name] = weight
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}.mlp.experts."
        if is_moe(config, layer):
            experts = range(int(str(config["num_experts"])))
            gate, up, down = (
                [w[f"{prefix}{e}.{half}_proj.weight"].chunk(tp, dim_)[rank] for e in experts]
                for half, dim_ in (("gate", 0), ("up", 0), ("down", 1))
            )
            out[f"{prefix}w13_weight"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
            out[f"{prefix}w2_weight"] = torch.stack(down)
    return out


def vllm_sizes(config: Config) -> list[int]:
    """Tensor-parallel sizes up to 4 that vLLM can use."""
    c = {key: value for key, value in config.items() if isinstance(value, int)}
    widths = [c["num_attention_heads"], c["intermediate_size"], c.get("moe_intermediate_size", 4)]
    kv = c["num_key_value_heads"]
    return [tp for tp in (1, 2, 4) if all(width % tp == 0 for width in widths) and (kv % tp == 0 or tp % kv == 0)]


def zeros_like(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in tensors.items()}


def read(tensors: dict[str, Tensor], held: WeightSlice) -> Tensor:
    return tensors[held.tensor][tuple(slice(a, b) for a, b in held.local)]


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
