"""Kernels of FSDP workers, against torch in float64 and transformers' own modules."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from tests.gpu.kernels import DEVICE, kernel_tests, large

pytest.importorskip("triton")
pytestmark = kernel_tests


@pytest.mark.parametrize("shape", [large((151936, 1024)), (3, 4097), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_added_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from dagrl.workers.fsdp.kernels import add

    left, right = torch.randn(shape, device=DEVICE).to(dtype), torch.randn(shape, device=DEVICE).bfloat16()
    expected = left.float() + right.float()
    total = add(left, right)
    assert torch.equal(total, expected) and (total is left) == (dtype is torch.float32)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("shape", [large((151936, 1024)), (3, 4097)], ids=str)
def test_weights_are_clipped_and_updated_as_by_torch(shape: tuple[int, ...], factor: float) -> None:
    from dagrl.workers.fsdp.kernels import step

    start = [torch.randn(shape, device=DEVICE), torch.randn(100, device=DEVICE), torch.randn(5, device=DEVICE)]
    mine, exact = ([one.to(dtype).requires_grad_() for one in copy.deepcopy(start)] for dtype in (torch.float, torch.double))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    ours, truth = AdamW(mine, fused=True, **settings), AdamW(exact, **settings)
    for number in range(4):
        for weight, other in zip(mine[:2], exact, strict=False):  # the last one has no gradient
            weight.grad = torch.randn(weight.shape, device=DEVICE) / 10**number
            other.grad = weight.grad.double() * (factor if number else 1.0)
        ours.step() if number == 0 else step(ours, factor)
        truth.step()
    torch.testing.assert_close(mine[2], start[2])
    for weight, other in zip(mine[:2], exact, strict=False):
        torch.testing.assert_close(weight.double(), other, atol=1e-6, rtol=1e-5)
        for name, value in truth.state[other].items():
            torch.testing.assert_close(ours.state[weight][name].double(), value.double().to(DEVICE), atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize("compiles", [False, large(True)])
def test_fused_attention_is_that_of_transformers(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from dagrl.workers.fsdp.copies import ComputeCopies
    from dagrl.workers.fsdp.heads import fuse_attention
    from dagrl.workers.fsdp.model import HiddenStates

    for name in ("dagrl.workers.fsdp.heads", "dagrl.workers.megatron.triton_kernels"):
        monkeypatch.setattr(f"{name}.HEAD_PROGRAMS", 8)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 16}
    config = AutoConfig.for_model("qwen3", vocab_size=128, num_key_value_heads=2, pad_token_id=0, **sizes)
    exact = AutoModelForCausalLM.from_config(config).to(DEVICE, torch.float32)
    for name, weight in exact.named_parameters():
        weight.data.mul_(4 if "_proj" in name else 1 + 0.3 * torch.randn_like(weight) if "norm" in name else 1)
    root, kinds = HiddenStates(copy.deepcopy(exact)), [type(part) for part in exact.modules()]
    fuse_attention(root.net, torch.bfloat16)
    root.copies = ComputeCopies(root, torch.bfloat16)
    assert sum(type(part) is not kind for part, kind in zip(root.net.modules(), kinds, strict=True)) == 2
    if compiles:
        for layer in root.net.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
    positions = torch.arange(17, device=DEVICE) + torch.tensor([[0], [5]], device=DEVICE)
    for tokens in torch.randint(128, (3, 2, 17), device=DEVICE):
        upper = torch.randn(2, 17, 64, device=DEVICE)
        (root(tokens, positions).float() * upper).sum().backward()
        (HiddenStates(exact)(tokens, positions) * upper).sum().backward()
    root.copies.free()
    assert [name for name, _ in root.net.named_parameters()] == [name for name, _ in exact.named_parameters()]
    for (name, weight), other in zip(root.net.named_parameters(), exact.parameters(), strict=True):
        if other.grad is not None:
            assert weight.grad.dtype is torch.float32 and (weight.grad - other.grad).norm() <= 0.06 * other.grad.norm(), name
