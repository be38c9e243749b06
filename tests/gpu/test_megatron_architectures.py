"""On one GPU: latent attention, sliding windows and YaRN of the Megatron worker, against transformers and plain math."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.workers.train.microbatches import make_segments
from tests.gpu.test_megatron_packing import PREFIXES, plain_attention
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import WAYS, plain_group, plain_torch, run_alone, run_group_alone

pytest.importorskip("megatron.core")

PUBLISHED_HEADS = {
    **{"q_lora_rank": 96, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128},
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": PUBLISHED_HEADS,  # with YaRN and groups of experts
    "deepseek_v3_plain": {},  # heads of 24 numbers, queries that are not compressed
    "mistral": {},  # YaRN, a window in every layer
    "qwen3_windows": {},  # a window in every second layer
}
ROWS = ("padded", "packed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: reference.make_model(name, directory, **changes) for name, changes in MODELS.items()}


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_float32_steps_match_transformers(name: str, way: str, models: dict[str, Path]) -> None:
    found, expected = run_alone(models[name], precision="float32", **WAYS[way]), plain_torch(models[name])
    assert set(found.gradients) == set(expected.gradients)
    off = reference.gradient_error(found.gradients, expected.gradients)
    print(f"gradients {off:.1e}, log-probabilities {np.abs(found.logprobs - expected.logprobs).max():.1e}")
    assert off < 2e-5
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=3e-5, rtol=0)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=3e-5, rtol=0)
    np.testing.assert_allclose(found.losses, expected.losses, atol=3e-5, rtol=0)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_steps_are_close_to_float32(name: str, way: str, models: dict[str, Path]) -> None:
    found, expected = run_alone(models[name], precision="bfloat16", **WAYS[way]), plain_torch(models[name])
    assert set(found.gradients) == set(expected.gradients)
    assert not reference.beyond_bfloat16(found, expected)


@pytest.mark.parametrize(
    ("name", "graphs"), [("deepseek_v3", False), ("deepseek_v3", True), ("qwen3_windows", False)], ids=str
)
def test_shared_prefixes_are_as_close_to_float32_as_whole_sequences(
    name: str, graphs: bool, models: dict[str, Path]
) -> None:
    for shared in (False, True):
        found, saved = run_group_alone(models[name], shared, graphs)
        assert (saved > 0.1) == shared
        assert not reference.beyond_bfloat16(found, plain_group(models[name]))


LENGTHS = [[192, 8, 1024, 64, 760], [448, 512, 1088]]


@pytest.mark.parametrize("prefixes", [(), PREFIXES], ids=["apart", "prefixes"])
@pytest.mark.parametrize(
    ("size", "values", "window"),
    [(192, 128, None), (24, 12, None), (128, 128, 100), (64, 64, 1024)],
    ids=["published", "small", "short window", "long window"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_agrees_with_plain_math(
    size: int, values: int, window: int | None, dtype: torch.dtype, prefixes: tuple[int, ...]
) -> None:
    """Sequences of many blocks of a kernel, in packed rows."""
    from dagrl.workers.megatron.attention import CausalAttention, LayerInputs

    torch.manual_seed(0)
    settings = SimpleNamespace(kv_channels=size, context_parallel_size=1)
    layer = CausalAttention(settings, 1, None, "self", softmax_scale=0.9 * size**-0.5)
    layer.window = window
    segments = make_segments(LENGTHS, 1, 0, torch.device("cuda"), prefixes)
    shape, kv_heads = (sum(LENGTHS[0]), len(LENGTHS)), 8 if values < size else 2
    sizes = [(8, size), (kv_heads, size), (kv_heads, values)]
    exact = [torch.randn(*shape, *rest, device="cuda").to(dtype).double() for rest in sizes]
    upper = torch.randn(*shape, 8 * values, device="cuda").to(dtype).double()

    def results(attention: Any, kind: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(kind).requires_grad_() for tensor in exact]
        out = attention(*leaves)
        out.backward(upper.to(kind))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def plain(*tensors: Tensor) -> Tensor:
        """Softmax of each sequence's products, with a loop over sequences."""
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in tensors)
        out = plain_attention(query, key, value, segments, layer.scale, window)
        return out.flatten(1).view(shape[1], shape[0], -1).transpose(0, 1)

    def found(*tensors: Tensor) -> Tensor:
        out: Tensor = layer(*tensors, None, packed_seq_params=LayerInputs(segments, None))
        return out

    bound = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for name, one, other in zip(
        ("output", "query", "key", "value"), results(found, dtype), results(plain, torch.float64), strict=True
    ):
        assert float((one.double() - other).norm() / other.norm()) < bound, name
