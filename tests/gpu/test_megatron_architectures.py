"""On one GPU: latent attention, sliding windows and YaRN of the Megatron worker, against transformers and plain math."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.runtime.worker import ReplayContext, replay_context
from dagrl.workers.train.microbatches import make_segments
from tests.integration import megatron_reference as reference
from tests.integration.megatron_worker import TestedWorker, gradients_alone
from tests.integration.test_megatron_layouts import UNCLIPPED, group_batch, plain_torch
from tests.single_worker import single_worker

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
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: reference.make_model(name, directory, **changes) for name, changes in MODELS.items()}


def run(model: Path, **policy: Any) -> reference.Run:
    """Returns log-probabilities, gradients and three steps of one worker in this process."""
    batch = reference.make_batch()
    with single_worker(reference.make_config(model, optimizer=UNCLIPPED, **policy), TestedWorker) as made:
        rows = made.logprobs(batch)
        assert rows is not None
        with gradients_alone():
            made.train_step(batch, "likelihood")
        gradients = reference.assemble([made.gradients()])
        steps = []
        for step in range(reference.STEPS):
            with replay_context(ReplayContext("test", step, False)):
                steps.append(made.train_step(batch, "likelihood").flat())
    losses, norms = ([step[name] for step in steps] for name in ("loss", "grad_norm"))
    return reference.Run(rows["logprobs"], rows["entropy"], losses, norms, gradients)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_float32_steps_match_transformers(name: str, way: str, models: dict[str, Path]) -> None:
    found, expected = run(models[name], precision="float32", **WAYS[way]), plain_torch(models[name])
    assert set(found.gradients) == set(expected.gradients)
    off = reference.gradient_error(found.gradients, expected.gradients)
    print(f"gradients {off:.1e}, log-probabilities {np.abs(found.logprobs - expected.logprobs).max():.1e}")
    assert off < 2e-5
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=3e-5, rtol=0)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=3e-5, rtol=0)
    np.testing.assert_allclose(found.losses, expected.losses, atol=3e-5, rtol=0)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_steps_are_close_to_float32(name: str, way: str, models: dict[str, Path]) -> None:
    found, expected = run(models[name], precision="bfloat16", **WAYS[way]), plain_torch(models[name])
    assert set(found.gradients) == set(expected.gradients)
    assert not reference.beyond_bfloat16(found, expected)


@pytest.mark.parametrize(
    ("name", "graphs"), [("deepseek_v3", False), ("deepseek_v3", True), ("qwen3_windows", False)], ids=str
)
def test_shared_prefixes_are_as_close_to_float32_as_whole_sequences(
    name: str, graphs: bool, models: dict[str, Path]
) -> None:
    batch = group_batch()
    plain = reference.make_config(models[name], optimizer=UNCLIPPED)
    expected = reference.train_reference(models[name], batch, plain, reference.sft_reference, steps=1)
    inside = np.arange(batch.tokens) < batch["lengths"][:, None]
    for shared in (False, True):
        packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": shared}
        keys = {"sequence_packing": packing, "megatron_cfg": {"cuda_graphs": graphs}, "optimizer": UNCLIPPED}
        with single_worker(reference.make_config(models[name], precision="bfloat16", **keys), TestedWorker) as made:
            for _ in range(3 if graphs else 1):  # the third is a replay
                rows = made.logprobs(batch)
                metrics = made.train_step(batch.with_scalars(lr=0.0), "likelihood").flat()
            gradients = reference.assemble([made.gradients()])
        assert rows is not None and (metrics["shared_prefix_share"] > 0.1) == shared
        found = reference.Run(rows["logprobs"], [], [metrics["loss"]], [metrics["grad_norm"]], gradients)
        alone = reference.Run(expected.logprobs * inside, [], expected.losses, expected.norms, expected.gradients)
        assert not reference.beyond_bfloat16(found, alone)


LENGTHS = [[192, 8, 1024, 64, 760], [448, 512, 1088]]
PREFIXES = (-1, 0, 0, -1, -1, -1, 5, 5)  # the first of each row is the prefix of the next two


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
        lengths = [length for row in LENGTHS for length in row]
        queries, keys, parts = (torch.split(tensor.transpose(0, 1).flatten(0, 1), lengths) for tensor in tensors)
        outputs = []
        for q, k, v, head in zip(queries, keys, parts, prefixes or [-1] * len(lengths), strict=True):
            if head >= 0:
                k, v = torch.cat((keys[head], k)), torch.cat((parts[head], v))
            k, v = (tensor.repeat_interleave(8 // kv_heads, 1) for tensor in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
            back = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
            seen = (back >= 0) & (back < (window or len(k)))
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
        return torch.cat(outputs).view(shape[1], shape[0], -1).transpose(0, 1)

    def found(*tensors: Tensor) -> Tensor:
        out: Tensor = layer(*tensors, None, packed_seq_params=LayerInputs(segments, None))
        return out

    bound = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for name, one, other in zip(
        ("output", "query", "key", "value"), results(found, dtype), results(plain, torch.float64), strict=True
    ):
        assert float((one.double() - other).norm() / other.norm()) < bound, name
