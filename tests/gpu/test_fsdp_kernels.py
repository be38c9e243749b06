"""Kernels of FSDP workers, against torch in float64 and transformers' own modules."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from dagrl.config import FsdpConfig
from dagrl.workers.fsdp.copies import ComputeCopies
from dagrl.workers.fsdp.model import HiddenStates, prepare_layer
from tests.gpu.kernels import DEVICE, kernel_tests, large
from tests.unit.workers.test_fsdp_model import tiny

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
@pytest.mark.parametrize("shape", [large((151936, 1024)), (3, 4097), (0, 8)], ids=str)
def test_weights_are_clipped_and_updated_as_by_torch(shape: tuple[int, ...], factor: float) -> None:
    from dagrl.workers.fsdp.kernels import clipped_step

    start = [torch.randn(shape, device=DEVICE), torch.randn(100, device=DEVICE), torch.randn(5, device=DEVICE)]
    mine, exact = ([one.to(dtype).requires_grad_() for one in copy.deepcopy(start)] for dtype in (torch.float, torch.double))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    ours, truth = AdamW(mine, fused=True, **settings), AdamW(exact, **settings)
    for number in range(4):
        for weight, other in zip(mine[:2], exact, strict=False):  # the last one has no gradient
            weight.grad = torch.randn(weight.shape, device=DEVICE) / 10**number
            other.grad = weight.grad.double() * (factor if number else 1.0)
        ours.step() if number == 0 else clipped_step(ours, factor)
        truth.step()
    torch.testing.assert_close(mine[2], start[2])
    for weight, other in zip(mine[:2], exact, strict=False):
        torch.testing.assert_close(weight.double(), other, atol=1e-6, rtol=1e-5)
        for name, value in truth.state[other].items():
            torch.testing.assert_close(ours.state[weight][name].double(), value.double().to(DEVICE), atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize("recomputes", ["none", "full"])
@pytest.mark.parametrize("compiles", [False, large(True)])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_fused_attention_is_that_of_transformers(kind: str, compiles: bool, recomputes: Any, monkeypatch: Any) -> None:
    from dagrl.workers.fsdp.heads import FusedAttention, fuse_attention

    monkeypatch.setattr("dagrl.workers.megatron.triton_kernels.HEAD_PROGRAMS", 8)
    exact = tiny(kind, num_attention_heads=6, num_key_value_heads=2, head_dim=16, mlp_only_layers=[0, 1]).to(DEVICE)
    for name, weight in exact.named_parameters():
        weight.data.mul_(4 if "_proj" in name else 1 + 0.3 * torch.randn_like(weight) if "norm" in name else 1)
    root, truth = HiddenStates(copy.deepcopy(exact)), HiddenStates(exact)
    fuse_attention(root.net, torch.bfloat16)
    assert sum(isinstance(part, FusedAttention) for part in root.modules()) == 2
    root.copies = ComputeCopies(root, torch.bfloat16)
    for layer in root.net.model.layers:
        prepare_layer(layer, FsdpConfig(activation_checkpointing=recomputes), compiles=compiles)
    for tokens in torch.randint(200, (3, 2, 17), device=DEVICE):
        positions, upper = torch.arange(17, device=DEVICE) + tokens[:, :1], torch.randn(2, 17, 1, device=DEVICE)
        (root(tokens, positions).float() * upper).sum().backward()
        (truth(tokens, positions) * upper).sum().backward()
    root.copies.free()
    found, expected = (dict[str, Any](part.named_parameters()) for part in (root.net.model, exact.model))
    assert found.keys() == expected.keys()
    for name, grad in ((name, one.grad) for name, one in expected.items()):
        assert found[name].grad.dtype is torch.float32 and (found[name].grad - grad).norm() <= 0.06 * grad.norm(), name
