"""Names under Transformer Engine, by Megatron-Core's own map from local layer names. Needs no Transformer Engine."""

from __future__ import annotations

import pytest

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.megatron import MegatronModules
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.families import FAMILIES

pytest.importorskip("megatron.core")

LAYOUT = ParallelLayout(tp=2, pp=2)


def key_map(experts: int | None) -> dict[str, str]:
    """Megatron-Core's name maps between checkpoints of local and Transformer Engine layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=True)
    return dict(spec.submodules.sharded_state_dict_keys_map)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fused_norms_are_where_megatron_finds_them(family: str) -> None:
    found = key_map(None)
    assert set(found) == {"input_layernorm.", "pre_mlp_layernorm."}
    for rank in range(LAYOUT.world_size):
        local = megatron_weight_slices(FAMILIES[family], LAYOUT, rank)
        fused = megatron_weight_slices(FAMILIES[family], LAYOUT, rank, MegatronModules(transformer_engine=True))
        expected = []
        for held in local:
            name = held.tensor
            for old, new in found.items():
                name = name.replace(old, new)
            expected.append((held.name, held.box, name, held.local))
        assert [(one.name, one.box, one.tensor, one.local) for one in fused] == expected
        assert any("linear_fc1.layer_norm_weight" in one.tensor for one in fused)


def test_norms_before_experts_are_not_fused() -> None:
    """The router follows it: Transformer Engine's layers keep `pre_mlp_layernorm` (`gpt_layer_specs.py`, `TENorm`)."""
    fused = megatron_weight_slices(FAMILIES["mixtral"], ParallelLayout(), 0, MegatronModules(transformer_engine=True))
    names = {held.tensor for held in fused}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in names
