"""Experts by grouped products, against transformers' loop over experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 16},
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 3},  # transposed weights, biases
    "nemotron_h": {  # without a gate
        **{"layers_block_type": ["attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "moe_latent_size": None},
    },
}


class Operators(TorchDispatchMode):
    """Counts the calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def experts_of(kind: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    (experts,) = (part for part in model.modules() if hasattr(part, "_is_expert_parallel"))
    generator = torch.Generator().manual_seed(1)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return experts


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(kind: str) -> None:
    from dagrl.workers.fsdp.experts import GROUPED_PERMUTED, use_permutations

    experts = experts_of(kind, torch.float32)
    loop = copy.deepcopy(experts)
    loop.config._experts_implementation_internal = "eager"
    use_permutations(experts)
    assert experts.config._experts_implementation == GROUPED_PERMUTED
    hidden, count = torch.randn(9, 32), experts.num_experts
    found, expected = [], []
    for module, results in ((experts, found), (loop, expected)):
        inputs = hidden.clone().requires_grad_()
        scores = torch.linspace(-1, 1, 9 * count).view(9, count).sin().requires_grad_()
        weights, chosen = scores.softmax(-1).topk(KINDS[kind]["num_experts_per_tok"])
        output = module(inputs, chosen, weights)
        gradients = torch.autograd.grad((output**2).sum(), [inputs, scores, *module.parameters()])
        results += [output, *gradients]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_half_precision_takes_grouped_products_and_adds_up_no_rows() -> None:
    from dagrl.workers.fsdp.experts import use_permutations

    experts = experts_of("qwen3_moe", torch.bfloat16)
    use_permutations(experts)
    hidden = torch.randn(9, 32, dtype=torch.bfloat16, requires_grad=True)
    with Operators() as operators:
        output = experts(hidden, torch.randint(5, (9, 2)), torch.rand(9, 2, dtype=torch.bfloat16))
        torch.autograd.backward(output, torch.ones_like(output))
    assert operators.names.count("_grouped_mm") == 6  # two, and two more for each one's gradients
    assert not [name for name in operators.names if name in ("mm", "bmm") or "index_put" in name]
