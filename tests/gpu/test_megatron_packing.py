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
from tests.integration.train_cases import WAYS, plain_group, plain_torch, run_alone, run_group_alone
from tests.integration.train_workers import TestedMegatronWorker, single_worker

pytest.importorskip("megatron.core")

GIB = 1 << 30
SEQUENCES = [[192, 8, 1024, 64, 760], [448, 512, 1088]]  # two rows, multiples of 8: each of four workers has two chunks


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Any, scale: float, window: int | None = None
) -> Tensor:
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
        back = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        seen = (back >= 0) & (back < (window or len(k)))
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


def test_packed_steps_are_as_close_to_float32_as_padded_ones(model: Path) -> None:
    truth, padded = plain_torch(model), run_alone(model, 0, precision="bfloat16")
    found = run_alone(model, 0, precision="bfloat16", **WAYS["packed"])
    assert reference.gradient_error(padded.gradients, truth.gradients) < 0.05
    assert_as_close(found, padded, truth)


def assert_as_close(found: reference.Run, other: reference.Run, truth: reference.Run) -> None:
    """Checks that gradients and log-probabilities are about as close to the truth as others are."""
    error, other_error = (reference.gradient_error(run.gradients, truth.gradients) for run in (found, other))
    off, other_off = (np.abs(run.logprobs - truth.logprobs).mean() for run in (found, other))
    assert error < 1.2 * other_error + 1e-3 and off < 1.2 * other_off + 1e-3


@pytest.mark.parametrize("way", ["padded", "packed"])
def test_float32_steps_match_plain_torch(way: str, model: Path) -> None:
    truth, found = plain_torch(model), run_alone(model, 0, precision="float32", **WAYS[way])
    assert reference.gradient_error(found.gradients, truth.gradients) < 1e-5
    np.testing.assert_allclose(found.logprobs, truth.logprobs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.entropy, truth.entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
def test_shared_prefixes_are_as_close_to_float32_as_whole_sequences(graphs: bool, model: Path) -> None:
    truth = plain_group(model)
    (whole, none), (shared, saved) = (run_group_alone(model, shared, graphs) for shared in (False, True))
    assert none <= 0.2 < saved
    assert reference.gradient_error(whole.gradients, truth.gradients) < 0.05
    assert_as_close(shared, whole, truth)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_reference_weights_are_swapped_in_and_out(where: str, sharded: bool, model: Path) -> None:
    config = reference.make_config(model, precision="bfloat16", reference_weights=where, sharded=sharded)
    batch = reference.make_batch()
    with single_worker(config, TestedMegatronWorker) as made:
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
