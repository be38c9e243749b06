"""Real Megatron-Core computes transformers' logits when our slices copy transformers' weights; see megatron_shapes.py.

This checks the order of parts inside a tensor (gate before up, `[nope; rope]` of a query head, keys before values; q, k and
v of a group): swapping two parts of equal shape would pass every check of shapes and sharding. Mamba mixers, which Megatron
computes on GPUs only, follow in `megatron_mixer.py`.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import multi_latent_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron import cpu
from dagrl.workers.megatron.versions import do_without_engine
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.families import FAMILIES, Hf, random_model
from tests.unit.refit.weight_reference import Weights, filled
from tests.unit.workers import megatron_mixer
from tests.unit.workers.megatron_models import rank_of, tensors_of, transformer_config

CASES = ("qwen2_moe", "deepseek_v3", "deepseek_v2")
TOKENS = torch.arange(3, 24).view(3, 7)


class Attention(torch.nn.Module):
    """Causal attention. Megatron's local one requires values and keys of equal size."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns `[seq, batch, heads * size of values]` for `[seq, batch, heads, size]` each."""
        parts = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
        made = scaled_dot_product_attention(*parts, is_causal=True, scale=self.scale, enable_gqa=True)
        return made.permute(2, 0, 1, 3).flatten(2)


def megatron_logits(config: Hf, weights: Weights) -> Tensor:
    """Returns logits `[batch, seq, vocab]` of a single-rank model filled by our slices."""
    options = transformer_config(config, ParallelLayout())
    options.layernorm_epsilon = 1e-6
    options.moe_router_pre_softmax = options.moe_router_score_function == "softmax"
    with rank_of(ParallelLayout(), 0):
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        spec = get_gpt_decoder_block_spec(options, use_transformer_engine=False, normalization="RMSNorm")
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
        model = GPTModel(options, spec, 384, 64, share_embeddings_and_output_weights=False, position_embedding_type="rope")
        live = tensors_of(model)
        with torch.no_grad():
            for name, value in filled(weights, megatron_weight_slices(config, ParallelLayout(), 0), live).items():
                live[name].copy_(value)
        positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
        with torch.no_grad():
            logits: Tensor = model.eval()(TOKENS, positions, None)
    return logits[..., : config["vocab_size"]]


def check(family: str) -> None:
    config = FAMILIES[family]
    with tempfile.TemporaryDirectory() as directory:
        model, weights = random_model(config, Path(directory))
    with torch.no_grad():
        expected = model(TOKENS).logits
    found = megatron_logits(config, weights)
    difference = float((found - expected).abs().max())
    assert difference < 1e-4 < 0.1 * float(expected.std()), (family, difference, float(expected.std()))
    print(family, "agrees", difference, flush=True)


def check_all() -> None:
    """Runs every case and the mixers, and prints a line for each. Must run before Megatron builds models in this process."""
    do_without_engine()
    multi_latent_attention.RotaryEmbedding = partial(RotaryEmbedding, use_cpu_initialization=True)  # Megatron's own layers
    torch.manual_seed(0)
    cpu.adapt()
    for family in CASES:
        check(family)
    megatron_mixer.check_all()
