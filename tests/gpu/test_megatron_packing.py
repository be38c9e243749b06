"""On one GPU: attention kernels against plain math, packed against padded BF16 steps, and memory of log-probabilities."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.workers.train.logprobs import OutputLayer, VocabularyShard, token_logprobs
from dagrl.workers.train.microbatches import upload
from tests.integration import megatron_reference as reference
from tests.integration.megatron_worker import TestedWorker, gradients_alone
from tests.integration.test_megatron_layouts import UNCLIPPED, group_batch, plain_torch
from tests.single_worker import single_worker

pytest.importorskip("megatron.core")

GIB = 1 << 30
SEQUENCES = [[192, 8, 1024, 64, 760], [448, 512, 1088]]  # two rows, multiples of 8: each of four workers has two chunks


def plain_attention(query: Tensor, key: Tensor, value: Tensor, segments: Any, scale: float) -> Tensor:
    """Computes causal softmax(q k^T) v of each segment separately, with its prefix; [tokens, heads, d]."""
    outputs = []
    group = query.shape[1] // key.shape[1]
    parts = [(query, segments.query_lengths), (key, segments.key_lengths), (value, segments.key_lengths)]
    queries, keys, values = (torch.split(tensor, lengths) for tensor, lengths in parts)
    for q, k, v, head in zip(queries, keys, values, segments.heads or [-1] * len(queries), strict=True):
        if head >= 0:
            k, v = torch.cat((keys[head], k)), torch.cat((values[head], v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


PREFIXES = (-1, 0, 0, -1, -1, -1, 5, 5)  # the first of each row is the prefix of the next two


@pytest.mark.parametrize(("size", "rank", "heads"), [(1, 0, ()), (2, 0, ()), (2, 1, ()), (4, 2, ()), (1, 0, PREFIXES)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_kernels_agree_with_plain_math(size: int, rank: int, heads: tuple[int, ...], dtype: torch.dtype) -> None:
    from dagrl.workers.megatron.attention import segment_attention
    from dagrl.workers.train.microbatches import make_segments

    torch.manual_seed(0)
    segments = make_segments(SEQUENCES, size, rank, torch.device("cuda"), heads)
    queries, keys = sum(segments.query_lengths), sum(segments.key_lengths)
    exact = [torch.randn(n, heads, 128, device="cuda") for n, heads in ((queries, 8), (keys, 2), (keys, 2), (queries, 8))]
    exact = [tensor.to(dtype).double() for tensor in exact]

    def run(attention: Any, kind: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(kind).requires_grad_() for tensor in exact[:3]]
        out = attention(*leaves, segments, 128**-0.5)
        out.backward(exact[3].to(kind))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for found, expected in zip(run(segment_attention, dtype), run(plain_attention, torch.float64), strict=True):
        assert relative(found, expected) < (1e-2 if dtype is torch.bfloat16 else 1e-5)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_arrays_reach_the_gpu_in_one_copy() -> None:
    sent = [np.arange(100_003), np.linspace(0, 1, 7, dtype=np.float32), np.arange(5, dtype=np.int32)]
    for _ in range(3):  # pinned memory is used again only when its copy is done
        arrived = upload(sent, torch.device("cuda"))
        assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1
        for tensor, array in zip(arrived, sent, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.make_model("qwen3", tmp_path_factory.mktemp("models"))


WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
}


def gradients_and_rows(model: Path, way: str, precision: str) -> tuple[dict[str, Any], Any]:
    config = reference.make_config(model, precision=precision, optimizer=UNCLIPPED, **WAYS[way])
    batch = reference.make_batch()
    with single_worker(config, TestedWorker) as made:
        rows = made.logprobs(batch)
        with gradients_alone():
            made.train_step(batch, "likelihood")
        return reference.assemble([made.gradients()]), rows


def test_packed_steps_are_as_close_to_float32_as_padded_ones(model: Path) -> None:
    truth = plain_torch(model)
    padded, padded_rows = gradients_and_rows(model, "padded", "bfloat16")
    found, rows = gradients_and_rows(model, "packed", "bfloat16")
    assert reference.gradient_error(padded, truth.gradients) < 0.05
    assert reference.gradient_error(found, truth.gradients) < 1.2 * reference.gradient_error(padded, truth.gradients) + 1e-3
    off, padded_off = (np.abs(given["logprobs"] - truth.logprobs).mean() for given in (rows, padded_rows))
    assert off < 1.2 * padded_off + 1e-3


@pytest.mark.parametrize("way", ["padded", "packed"])
def test_float32_steps_match_plain_torch(way: str, model: Path) -> None:
    truth = plain_torch(model)
    found, rows = gradients_and_rows(model, way, "float32")
    assert reference.gradient_error(found, truth.gradients) < 1e-5
    np.testing.assert_allclose(rows["logprobs"], truth.logprobs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rows["entropy"], truth.entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
def test_shared_prefixes_are_as_close_to_float32_as_whole_sequences(graphs: bool, model: Path) -> None:
    batch = group_batch()
    plain = reference.make_config(model, optimizer=UNCLIPPED)
    truth = reference.train_reference(model, batch, plain, reference.sft_reference)
    found: dict[bool, tuple[float, float]] = {}
    for shared in (False, True):
        packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": shared}
        megatron = {"cuda_graphs": graphs}
        config = reference.make_config(
            model, precision="bfloat16", megatron_cfg=megatron, optimizer=UNCLIPPED, sequence_packing=packing
        )
        with single_worker(config, TestedWorker) as made:
            for _ in range(3 if graphs else 1):  # the third is a replay
                rows = made.logprobs(batch)
                metrics = made.train_step(batch.with_scalars(lr=0.0), "likelihood").flat()
            gradients = reference.assemble([made.gradients()])
        assert rows is not None and (metrics["shared_prefix_share"] > 0.2) == shared
        off = float(np.abs(rows["logprobs"] - truth.logprobs * (np.arange(batch.tokens) < batch["lengths"][:, None])).mean())
        found[shared] = reference.gradient_error(gradients, truth.gradients), off
    assert found[False][0] < 0.05
    assert found[True][0] < 1.2 * found[False][0] + 1e-3 and found[True][1] < 1.2 * found[False][1] + 1e-3


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_reference_weights_are_swapped_in_and_out(where: str, sharded: bool, model: Path) -> None:
    config = reference.make_config(model, precision="bfloat16", reference_weights=where, sharded=sharded)
    batch = reference.make_batch()
    with single_worker(config, TestedWorker) as made:
        first = made.own_logprobs(batch)
        made.snapshot_reference()
        made.train_step(batch, "likelihood")
        learned = made.own_logprobs(batch)
        addresses = [tensor.data_ptr() for tensor in made.weight_tensors().values()]
        for _ in range(2):
            np.testing.assert_array_equal(made.own_logprobs(batch, "reference"), first)
            np.testing.assert_array_equal(made.own_logprobs(batch), learned)
        assert [tensor.data_ptr() for tensor in made.weight_tensors().values()] == addresses
    assert np.abs(learned - first).max() > 1e-3


@pytest.mark.parametrize("grad", [False, True], ids=["values", "gradients"])
def test_logprobs_need_the_memory_of_a_chunk(grad: bool) -> None:
    """With Qwen3's vocabulary all float32 logits would take 4.6 GiB, and their gradient as much again."""
    tokens, hidden_size, vocabulary, chunk = 8192, 1024, 151936, 512
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
    weight = (torch.randn(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_(grad)
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer = OutputLayer(weight, VocabularyShard(0, vocabulary), chunk_tokens=chunk)
    logprobs, entropy = token_logprobs(hidden, labels, layer)
    if grad:
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
    peak = torch.cuda.max_memory_allocated() - before
    one_chunk, gradients = chunk * vocabulary * 4, vocabulary * hidden_size * (4 + 4 + 2) + tokens * hidden_size * 2
    print(f"peak {peak / GIB:.2f} GiB in addition to {before / GIB:.2f} GiB of inputs; a chunk is {one_chunk / GIB:.2f} GiB")
    assert peak < 3 * one_chunk + (gradients if grad else 0) + GIB // 8
    with torch.no_grad():
        rows = slice(0, 256)
        distribution = (hidden[rows].double() @ weight.double().T).log_softmax(-1)
        expected = distribution.gather(-1, labels[rows, None])[:, 0]
        assert (logprobs[rows].double() - expected).abs().max() < 1e-4
        assert (entropy[rows].double() + (distribution.exp() * distribution).sum(-1)).abs().max() < 1e-3


def test_kept_exponentials_give_the_gradients_of_double_precision() -> None:
    """Weight gradients are added to a buffer, as to Megatron's."""
    torch.manual_seed(0)
    tokens, hidden_size, vocabulary = 700, 256, 20001
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.2)
    labels, scale = torch.randint(0, vocabulary, (tokens,), device="cuda"), torch.randn(tokens, device="cuda")
    exact = hidden.double().requires_grad_(), weight.detach().double().requires_grad_()
    chosen = (exact[0] @ exact[1].T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (chosen * scale).sum().backward()  # type: ignore[no-untyped-call]
    for keeps in (False, True):
        mine, buffer = hidden.clone().requires_grad_(), torch.zeros(vocabulary, hidden_size, device="cuda")
        weight.main_grad, weight.grad = buffer, None  # type: ignore[attr-defined]
        logprobs, _ = token_logprobs(mine, labels, OutputLayer(weight, VocabularyShard(0, vocabulary), keeps=keeps))
        (logprobs * scale).sum().backward()  # type: ignore[no-untyped-call]
        assert mine.grad is not None and (logprobs.double() - chosen).abs().max() < 1e-4
        for own, other in zip((mine.grad, buffer), exact, strict=True):
            assert other.grad is not None and (own.double() - other.grad).norm() / other.grad.norm() < 4e-3
