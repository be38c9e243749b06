"""Grouped experts against Megatron's sequential ones, and the dispatch of tokens against a loop over experts in float64."""

from importlib.util import find_spec
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.functional import gelu, silu

from dagrl.workers.megatron import cpu

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")

HIDDEN, FFN = 32, 24
COMMON: dict[str, Any] = {"num_layers": 1, "num_attention_heads": 2, "moe_token_dispatcher_type": "alltoall"}
COMMON |= dict.fromkeys(("add_bias_linear", "gradient_accumulation_fusion", "bias_activation_fusion"), False)
COMMON |= {"expert_model_parallel_size": 2, "use_cpu_initialization": True}
SWIGLU: dict[str, Any] = {"gated_linear_unit": True, "activation_func": silu, "moe_router_topk": 2}
CLAMPED = SWIGLU | {"activation_func_clamp_value": 0.05, "glu_linear_offset": 1.0}
GELU = {"gated_linear_unit": False, "activation_func": gelu, "moe_router_topk": 2}
KINDS: dict[str, dict[str, Any]] = {"swiglu": SWIGLU, "clamped": CLAMPED, "gelu": GELU}
COUNTS = [[3, 0, 1, 8, 5], [0, 16, 0], [0, 0, 0], [7], [1, 1, 1, 1]]


class OneRank:
    """A process group of this process only, without a backend."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


Way = Literal["grouped", "sequential"]
WAYS: tuple[Way, Way] = "grouped", "sequential"


def make_experts(
    way: Way, experts: int, kind: str = "swiglu", hidden: int = HIDDEN, ffn: int = FFN, dtype: torch.dtype = torch.float32
) -> Any:
    """Returns the half of a layer's experts that one of two workers holds, so that the products need no collective.

    Their weights depend on nothing but their sizes, before they are rounded to `dtype`.
    """
    cpu.adapt()
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dagrl.workers.megatron.experts import GroupedExperts

    sizes = {"hidden_size": hidden, "ffn_hidden_size": 2 * ffn, "moe_ffn_hidden_size": ffn, "num_moe_experts": 2 * experts}
    config = TransformerConfig(**sizes, **COMMON, **KINDS[kind])
    group = OneRank()
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = SimpleNamespace(ep=group, expt_tp=group, expt_dp=group)
    layer = (GroupedExperts if way == "grouped" else SequentialMLP)(experts, config, linear, groups)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    return layer.to(dtype)


def inputs_of(counts: list[int], hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states [tokens, hidden], probabilities [tokens] and the loss's output weights, in float32."""
    generator = torch.Generator().manual_seed(2)
    tokens = sum(counts)
    states, weights = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
    return states, torch.rand(tokens, generator=generator), weights


def run(layer: Any, counts: list[int], inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Returns outputs and the gradients of all inputs and weights, for a loss linear in the outputs."""
    parameters = dict(layer.named_parameters())
    dtype, device = next((parameter.dtype, parameter.device) for parameter in parameters.values())
    states, probs, weights = inputs
    hidden = states.to(device, dtype, copy=True).requires_grad_()
    scales = probs.to(device, copy=True).requires_grad_()  # float32, as routers give them
    outputs, bias = layer(hidden, torch.tensor(counts), scales)
    assert bias is None
    outputs.backward(weights.to(device, dtype))
    found = {"outputs": outputs.detach(), "hidden": hidden.grad, "probs": scales.grad}
    return {**found, **{name: parameter.grad for name, parameter in parameters.items()}}  # type: ignore[dict-item]


def relative(found: Tensor, expected: Tensor) -> float:
    """Returns the relative norm of the difference; 0 if both are 0."""
    difference, norm = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / norm) if norm else float(difference)


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    counts=st.sampled_from(COUNTS) | st.lists(st.integers(0, 20), min_size=1, max_size=9),
)
def test_outputs_and_gradients_equal_sequential_experts(kind: str, counts: list[int]) -> None:
    inputs = inputs_of(counts)
    found = run(make_experts("grouped", len(counts), kind), counts, inputs)
    expected = run(make_experts("sequential", len(counts), kind), counts, inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_bfloat16_is_as_close_to_float32_as_sequential_experts(counts: list[int]) -> None:
    inputs = inputs_of(counts)
    exact = run(make_experts("sequential", len(counts)), counts, inputs)
    near = run(make_experts("sequential", len(counts), dtype=torch.bfloat16), counts, inputs)
    found = run(make_experts("grouped", len(counts), dtype=torch.bfloat16), counts, inputs)
    for name, value in exact.items():
        assert found[name].dtype is near[name].dtype
        assert relative(found[name], value) < 1.2 * relative(near[name], value) + 1e-3 < 0.03, name


@pytest.mark.parametrize("counts", [[2, 2], [4, 4]], ids=str)
def test_counts_that_do_not_sum_to_the_rows_are_rejected(counts: list[int]) -> None:
    with pytest.raises(AssertionError, match="6 rows for experts with"):
        make_experts("grouped", 2)(torch.randn(6, HIDDEN), torch.tensor(counts), torch.rand(6))


def test_rows_and_gradients_may_have_any_strides() -> None:
    counts, layer = [3, 0, 5], make_experts("grouped", 3)
    states, probs, weights = inputs_of(counts)
    expected = run(layer, counts, (states, probs, weights))
    layer.zero_grad()
    hidden = states.t().contiguous().t().requires_grad_()
    outputs, _ = layer(hidden, torch.tensor(counts), probs)
    outputs.backward(weights.t().contiguous().t())
    assert not hidden.is_contiguous()
    torch.testing.assert_close(hidden.grad, expected["hidden"])
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_no_copy_of_the_weights_is_saved_for_the_backward_pass() -> None:
    layer, counts, kept = make_experts("grouped", 4), [2, 2, 2, 2], []
    states, probs, _ = inputs_of(counts)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(states, torch.tensor(counts), probs)
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    assert {tensor.data_ptr() for tensor in kept} >= own
    smallest = min(parameter.numel() for parameter in layer.parameters())
    assert all(tensor.numel() < smallest for tensor in kept if tensor.data_ptr() not in own)


def test_weights_at_equal_distances_are_multiplied_without_a_copy() -> None:
    from dagrl.workers.megatron.experts import joined

    memory = torch.arange(24.0).view(4, 3, 2)
    whole = joined(list(memory[:, :2]))
    assert whole is not None and whole.data_ptr() == memory.data_ptr() and torch.equal(whole, memory[:, :2])
    others = [memory[0], memory[2], memory[3]], list(reversed(list(memory))), [memory[0], memory[1].clone()]
    assert [joined(part) for part in others] == [None, None, None]


@pytest.mark.parametrize("counts", [[3, 1, 2], [3, 0, 2]], ids=str)
def test_weight_gradients_are_added_to_megatrons_buffer(counts: list[int]) -> None:
    from dagrl.workers.megatron.experts import experts_last_first

    expected = run(make_experts("grouped", 3), counts, inputs_of(counts))
    layer = make_experts("grouped", 3)
    layer.join_weights()
    parameters = [part for _, part in experts_last_first(layer.named_parameters())][::-1]  # as Megatron's buffers
    places, memory = [0, *accumulate(part.numel() for part in parameters)], torch.ones(sum(map(torch.numel, parameters)))
    for place, part in zip(places[:-1], parameters, strict=True):
        part.main_grad, part.grad_added_to_main_grad = memory[place : place + part.numel()].view_as(part), False
    run(layer, counts, inputs_of(counts))
    for name, part in layer.named_parameters():
        assert part.grad_added_to_main_grad
        torch.testing.assert_close(part.main_grad - 1, expected[name], rtol=1e-5, atol=1e-6)


def test_checkpoints_have_the_names_of_sequential_experts() -> None:
    metadata = {"dp_cp_group": OneRank()}
    found, expected = (make_experts(way, 3).sharded_state_dict("mlp.experts.", (), metadata) for way in WAYS)
    assert [(name, value.key) for name, value in found.items()] == [(name, value.key) for name, value in expected.items()]


WIDTH = 12


def routed(tokens: int, experts: int, chosen: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Experts of each token [tokens, chosen], their map and their weights [tokens, experts]."""
    generator = torch.Generator().manual_seed(tokens + 100 * experts)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :chosen]
    mask = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, ids, True)
    weights = torch.rand(tokens, experts, generator=generator, dtype=torch.float64) * mask
    return ids.to(device), mask.to(device), weights.to(device)


def dispatched(hidden: Tensor, ids: Tensor, mask: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Dispatches rows to experts. Expert e multiplies tanh of its rows by row e of `scales` [experts, width]."""
    from dagrl.workers.megatron.experts import LocalDispatcher

    router: Any = SimpleNamespace(chosen=ids)
    layer = LocalDispatcher(router)
    rows, probs = layer.dispatch_preprocess(hidden, mask, weights)
    rows, counts, probs = layer.dispatch_postprocess(*layer.token_dispatch(rows, probs))
    assert counts.tolist() == mask.sum(0).tolist()
    outputs = rows.tanh() * scales.repeat_interleave(counts, 0) * probs[:, None].to(rows.dtype)
    return layer.combine_postprocess(layer.token_combine(layer.combine_preprocess(outputs)))


def looped(hidden: Tensor, mask: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    flat, total = hidden.view(-1, hidden.shape[-1]), torch.zeros_like(hidden).view(-1, hidden.shape[-1])
    for expert in range(mask.shape[1]):
        held = mask[:, expert].nonzero()[:, 0]
        total = total.index_add(0, held, flat[held].tanh() * scales[expert] * weights[held, expert, None])
    return total.view_as(hidden)


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(0, 12), experts=st.integers(1, 7), data=st.data())
def test_outputs_and_gradients_are_those_of_a_loop(tokens: int, experts: int, data: st.DataObject) -> None:
    ids, mask, weights = routed(tokens, experts, data.draw(st.integers(1, experts)))
    hidden, scales, upper = (torch.randn(*shape, WIDTH).double() for shape in ((tokens, 1), (experts,), (tokens, 1)))
    inputs = [one.requires_grad_() for one in (hidden, weights, scales)]
    found, expected = dispatched(hidden, ids, mask, weights, scales), looped(hidden, mask, weights, scales)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(outputs, inputs, upper) for outputs in (found, expected))
    for gradient, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, truth)
