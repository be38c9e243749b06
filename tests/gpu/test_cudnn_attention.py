"""cuDNN's attention of packed sequences, against plain math in float64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dagrl.workers.train import cudnn_attention as cudnn
from tests.gpu.test_megatron_packing import relative
from tests.unit.workers.test_packed_attention import plain, starts_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not cudnn.available(torch.device("cuda", 0)),
    reason="needs a Hopper GPU, and nvidia-cudnn-frontend",
)
LENGTHS, KEY_LENGTHS = (300, 77, 512, 1), (400, 77, 900, 64)


def inputs(head: int, keys: int) -> list[Tensor]:
    """Returns query, key, value and the gradient of the output in float64, exact in bfloat16."""
    torch.manual_seed(0)
    shapes = (sum(LENGTHS), 8), (keys, 2), (keys, 2), (sum(LENGTHS), 8)
    return [torch.randn(tokens, heads, head, device="cuda", dtype=torch.bfloat16).double() for tokens, heads in shapes]


def results(attention: Any, tensors: list[Tensor], kind: torch.dtype) -> list[Tensor]:
    """Returns the output and the gradients of query, key and value."""
    leaves = [tensor.to(kind).requires_grad_() for tensor in tensors[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].to(kind))]


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("head", [64, 80, 128])
def test_it_agrees_with_plain_math(head: int, end: bool) -> None:
    key_lengths = KEY_LENGTHS if end else LENGTHS
    starts, key_starts, exact = starts_of(LENGTHS), starts_of(key_lengths), inputs(head, sum(key_lengths))
    on_gpu = starts.cuda(), key_starts.cuda(), max(LENGTHS), max(key_lengths)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cudnn.cudnn_attention(query, key, value, *on_gpu, 0.1, end)

    found = results(run, exact, torch.bfloat16)
    expected = results(lambda *each: plain(*each, *on_gpu[:2], 0.1, end), exact, torch.float64)
    assert max(relative(one, other) for one, other in zip(found, expected, strict=True)) < 1e-2


def test_batches_of_similar_sizes_share_plans() -> None:
    q, k, v, _ = (tensor.bfloat16() for tensor in inputs(128, sum(LENGTHS)))
    plans = []
    for lengths in (LENGTHS, (512, 378), (100, 200, 90, 400, 100)):
        starts = starts_of(lengths).cuda()
        cudnn.cudnn_attention(q, k, v, starts, starts, 512, 512, 0.1)
        plans.append(cudnn._plan.cache_info().currsize)
    assert len(set(plans)) == 1


def test_a_recorded_pass_repeats() -> None:
    q, k, v, grad = (tensor.bfloat16() for tensor in inputs(128, sum(LENGTHS)))
    starts = starts_of((*LENGTHS, 0, 0, 0, 0)).int().cuda()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cudnn.cudnn_attention(query, key, value, starts, starts, 512, 512, 0.1)

    expected = results(run, [q, k, v, grad], torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(run, [q, k, v, grad], torch.bfloat16)
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lengths", [(2048,) * 8, (4096,) * 4, (16384,)], ids=["2048", "4096", "16384"])
def test_it_is_faster_than_flash_attention(lengths: tuple[int, ...]) -> None:
    """With the heads of Qwen3-4B; `-s` shows the milliseconds of a forward and a backward pass."""
    starts, longest = starts_of(lengths).cuda(), max(lengths)
    q, k, v, grad = (torch.randn(sum(lengths), heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8, 32))
    leaves = [one.requires_grad_() for one in (q, k, v)]
    assert cudnn.faster(q, longest)

    def flash() -> Tensor:
        sizes = starts, starts, longest, longest, 0.0, True, False
        out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, scale=0.1)[0]
        return out

    def milliseconds(attention: Callable[[], Tensor]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for count in (3, 20):
            begin.record()
            for _ in range(count):
                torch.autograd.grad(attention(), leaves, grad)
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / count

    ours = milliseconds(lambda: cudnn.cudnn_attention(q, k, v, starts, starts, longest, longest, 0.1))
    theirs = milliseconds(flash)
    print(f"{lengths}: cuDNN {ours:.2f} ms, FlashAttention 2 {theirs:.2f} ms")
    assert ours < theirs


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("head", [64, 128, 256])
def test_fsdp_chooses_it_for_what_it_computes(head: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and large heads take FlashAttention 2."""
    from dagrl.workers.fsdp import attention

    monkeypatch.setattr(cudnn, "LEAST_WORK", 1)
    taken: list[int] = []

    def take(*each: Any) -> Tensor:
        taken.append(1)
        return cudnn.cudnn_attention(*each)

    monkeypatch.setattr(attention, "cudnn_attention", take)
    starts, exact = starts_of(LENGTHS).cuda(), inputs(head, sum(LENGTHS))
    sizes: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 512, "max_length_k": 512}

    def attend(*leaves: Tensor) -> Tensor:
        query, key, value = (leaf.transpose(0, 1)[None] for leaf in leaves)
        return attention.attend(SimpleNamespace(), query, key, value, None, 0.1, window, **sizes)[0][0]

    found = results(attend, exact, torch.bfloat16)
    expected = results(lambda *each: plain(*each, starts, starts, 0.1, False, window), exact, torch.float64)
    assert max(relative(one, other) for one, other in zip(found, expected, strict=True)) < 1e-2
    assert bool(taken) == (window is None and head <= cudnn.LARGEST_HEAD)
