"""Blockwise FP8 models and how vLLM holds them, written in plain torch: the reference for refits that quantize.

A whole model is quantized, parameter by parameter, and cut only then. So that scales are cut where their weights are, each
is spread over its block: `vllm_tensors` cuts and fuses what it is given, whatever that stands for. The rule of a block is
held to vLLM's own quantizer by `tests/integration/vllm_loads.py`.
"""

from collections.abc import Sequence
from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor

from dagrl.refit.slices import WeightSlice, expand
from tests.unit.refit.weight_reference import FLOAT32, LATENT, TYPES, Config, Weights, hf_weights, model_config, vllm_tensors

PLAIN = ("embed", "lm_head", "norm", "gate.weight")
"""Name parts of unquantized matrices: vLLM quantizes linear layers except routers and the head."""


@st.composite
def fp8_configs(draw: st.DrawFn) -> Config:
    """Small models whose shards are often whole blocks. Some parameters end inside a block."""
    model_type, kv_heads = draw(st.sampled_from(TYPES)), draw(st.sampled_from([2, 1, 4]))
    widths = st.sampled_from([256, 512, 128])
    heads = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2])),
        "head_dim": 128,
    }
    config = model_config(model_type, hidden_size=draw(st.sampled_from([128, 192, 256])), num_hidden_layers=2, **heads)
    config |= {"intermediate_size": draw(widths), "vocab_size": draw(st.integers(1, 300))}
    config["tie_word_embeddings"] = draw(st.booleans())
    if model_type in ("qwen3_moe", *LATENT):
        config["moe_intermediate_size"] = draw(st.sampled_from([256, 128, 200]))
    if model_type in LATENT:
        config |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_attention_heads": 4}
        config |= {"q_lora_rank": draw(st.sampled_from([None, 256])), "kv_lora_rank": draw(st.sampled_from([192, 128]))}
        config["num_key_value_heads"] = 4
    return config


def random_weights(config: Config, dtype: torch.dtype) -> Weights:
    """A model whose blocks have very different magnitudes, some below the smallest peak; router biases in float32."""
    generator = torch.Generator().manual_seed(0)
    weights: Weights = {}
    for name, numbers in hf_weights(config).items():
        weight = torch.randn(numbers.shape, generator=generator)
        if is_quantized(name, weight):
            exponents = torch.randint(-18, 8, [-(-size // 128) for size in weight.shape], generator=generator)
            weight *= spread(torch.exp2(exponents.float()), weight)
        weights[name] = weight if name.endswith(FLOAT32) else weight.to(dtype)
    return weights


def is_quantized(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and not any(part in name for part in PLAIN)


def spread(blocks: Tensor, like: Tensor) -> Tensor:
    """Expands a value per block to every element of the block."""
    rows, columns = like.shape
    return blocks.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 and its block scales: a block's largest magnitude, at least 1e-4, becomes 448."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for row, column in product(*map(range, scales.shape)):
        block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
        scale = weight[block].float().abs().max().clamp(min=1e-4) / 448
        scales[row, column] = scale
        out[block] = (weight[block].float() * (1 / scale)).to(torch.float8_e4m3fn)
    return out, scales


def quantized_model(whole: Weights) -> tuple[Weights, Weights]:
    """A whole model with FP8 as bytes, and the scale of every element at its position."""
    parts = {name: quantized(weight) for name, weight in whole.items() if is_quantized(name, weight)}
    raw = {name: part.view(torch.uint8) for name, (part, _) in parts.items()}
    return whole | raw, whole | {name: spread(scales, whole[name]) for name, (_, scales) in parts.items()}


def fp8_tensors(model: tuple[Weights, Weights], config: Config, tp: int, rank: int, expert_parallel: bool) -> Weights:
    """Returns vLLM's tensors on `rank` for a `quantized_model`: FP8 as bytes, with the scales of their blocks."""
    held, scales = (vllm_tensors(weights, config, tp, rank, expert_parallel) for weights in model)
    fused = [name for name, tensor in held.items() if tensor.dtype == torch.uint8]
    return held | {f"{name}_scale_inv": scales[name][..., ::128, ::128] for name in fused}


def cuts_a_block(whole: Weights, slices: Sequence[WeightSlice], local: bool) -> bool:
    """Returns whether a shard of a quantized parameter splits a block; with `local` also in the local tensor."""
    for one in expand(slices):
        if not is_quantized(one.name, whole[one.name]):
            continue
        for (start, stop), (at, _), end in zip(one.box, one.local[-2:], whole[one.name].shape, strict=True):
            if start % 128 or (stop % 128 and stop != end) or (local and at % 128):
                return True
    return False
