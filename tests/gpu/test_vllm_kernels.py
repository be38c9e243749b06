"""Our kernels of decode steps, against plain torch in float64: attention over pages, draws and scores of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.kernels import DEVICE, INTERPRETED, kernel_tests, large

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = kernel_tests

PAGE = 16
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # bfloat16 itself is off by up to 0.0078 beyond 2


def attention(queries: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Plain attention, a sequence after the other; zeros for one of no tokens."""
    out, repeats = torch.zeros_like(queries, dtype=torch.float64), queries.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths.tolist()):
        own = [cache[pages[row].long()].flatten(0, 1)[:length].double() for cache in (keys, values)]
        k, v = (cache.repeat_interleave(repeats, 1).transpose(0, 1) for cache in own)
        if length:
            weights = torch.softmax(k @ queries[row].double()[:, :, None] * scale, 1)
            out[row] = (weights.transpose(1, 2) @ v)[:, 0]
    return out


def cache(sequences: int, longest: int, groups: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [pages, PAGE, groups, size], next to each other as in vLLM, and the pages of each sequence."""
    count = -(-longest // PAGE)
    both = torch.randn(sequences * count + 3, PAGE, groups, 2 * size, device=DEVICE).to(dtype)
    pages = torch.randperm(sequences * count, device=DEVICE).view(sequences, count).int()
    return both[..., :size], both[..., size:], pages


@pytest.mark.parametrize(
    ("groups", "heads", "size", "longest", "units"),
    [
        pytest.param(2, 4, 64, 200, 1, id="one part each"),
        pytest.param(2, 4, 64, 600, 40, id="four parts"),
        pytest.param(1, 7, 128, 5000, 1056, id="most parts"),
        pytest.param(2, 2, 64, 1000, 1056, id="eight parts"),
        large(8, 16, 128, 3000, 1056),
        large(8, 32, 128, 70000, 1056),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.bfloat16], ids=str)
def test_attention_of_decode_steps(
    groups: int, heads: int, size: int, longest: int, units: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole sequences, a few tokens, none, parts that end within a page."""
    from dagrl.workers.vllm import decode_attention as kernels

    monkeypatch.setattr(kernels, "UNITS", 2 * units)
    monkeypatch.setattr(kernels, "FEWEST", units)
    keys, values, pages = cache(5, longest, groups, size, dtype)
    lengths = torch.tensor([longest, 5, 0, longest // 3, 129], dtype=torch.int32, device=DEVICE)
    queries, scale = torch.randn(5, heads, size, device=DEVICE).to(dtype), size**-0.5
    out = torch.full_like(queries, 7.0)
    kernels.decode_attention(queries, keys, values, pages, lengths, scale, longest, out)
    expected = attention(queries, keys, values, pages, lengths, scale)
    assert float((out.double() - expected).abs().max()) < TOLERANCES[dtype]


def test_calls_of_other_kinds_are_left_to_flash_attention() -> None:
    from dagrl.workers.vllm.decode_attention import takes

    keys, values, pages = cache(3, 100, 2, 64, torch.bfloat16)
    queries = torch.zeros(3, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    call: dict[str, Any] = {"q": queries, "k": keys, "v": values, "out": queries, "block_table": pages, "softcap": 0.0}
    call |= {"max_seqlen_q": 1, "max_seqlen_k": 100, "seqused_k": torch.ones(3), "softmax_scale": 0.125}
    call |= {"causal": True, "window_size": [-1, -1], "alibi_slopes": None}
    assert takes(call)
    others: list[dict[str, Any]] = [
        {"max_seqlen_q": 2},
        {"block_table": None},
        {"causal": False},
        {"window_size": [127, 0]},
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"q": queries.half()},
        {"q": queries[..., :32]},
        {"q": torch.zeros(3, 64, 64, device=DEVICE, dtype=torch.bfloat16)},
        {"seqused_k": torch.ones(2)},
        {"return_softmax_lse": True},
    ]
    for other in others:
        assert not takes(call | other), other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1000, 20100])
def test_sampled_tokens_are_scored(size: int, dtype: torch.dtype) -> None:
    """Rows of a wider matrix, with tokens that top-p has removed: part of a row, whole tiles, all but one."""
    from dagrl.workers.vllm.sampling_kernels import sampled_scores

    logits = (torch.randn(6, size + 60, device=DEVICE) * 3).to(dtype)[:, :size]
    logits[1, 5:] = logits[2, 1:-1] = logits[3, :-1] = float("-inf")
    tokens = torch.tensor([size // 2, 3, size - 1, size - 1, 0, 7], device=DEVICE)
    logprobs = sampled_scores(logits, tokens)
    chosen = logits.gather(-1, tokens[:, None])
    expected = chosen.double() - logits.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def draw_columns(seeds, positions, out, size, SIZE: tl.constexpr):  # type: ignore[name-defined,no-untyped-def]
    """Triton's own numbers between 0 and 1, as vLLM's sampler asks for them."""
    row, column = tl.program_id(0), tl.arange(0, SIZE)
    draws = tl.rand(tl.randint(tl.load(seeds + row), tl.load(positions + row)), column)
    tl.store(out + row * size + column, draws, mask=column < size)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def exact_noise(draw):  # type: ignore[no-untyped-def]
    """`_noise` without the functions of CUDA that the interpreter lacks."""
    return (-tl.log(-tl.log(1.0 - draw.to(tl.float64)))).to(tl.float32)


def sampling_state(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The request of each row, temperatures of which every third is greedy, seeds of 64 bits, and positions."""
    slots = torch.randperm(rows, device=DEVICE).int()
    temperatures = torch.where(torch.arange(rows, device=DEVICE) % 3 == 0, 0.0, 1.0)
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), device=DEVICE)
    return slots, temperatures, seeds, torch.arange(rows, device=DEVICE) * 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_tokens_are_drawn(spread: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token with the largest sum of logit and noise, in flat and in peaked distributions, with tokens left out."""
    from dagrl.workers.vllm import sampling_kernels as kernels

    if INTERPRETED:
        monkeypatch.setattr(kernels, "_noise", exact_noise)
    rows, size = 12, 5000
    logits = (torch.randn(rows, size + 24, device=DEVICE) * spread).to(dtype)[:, :size]
    logits[1:3, 7:] = logits[4, :-1] = float("-inf")
    state = slots, temperatures, seeds, positions = sampling_state(rows)
    sampled, logprobs = kernels.sampled_tokens(logits, *state)
    draws = torch.empty(rows, size, device=DEVICE)
    draw_columns[(rows,)](seeds[slots.long()], positions, draws, size, SIZE=triton.next_power_of_2(size))
    noise = -torch.log(-torch.log1p(-draws.double().clamp(min=4.6566127342e-10)))
    values = logits.double() + torch.where(temperatures[slots.long()] > 0, 1.0, 0.0)[:, None] * noise
    top, first = values.max(-1)
    chosen = values.gather(-1, sampled[:, None])[:, 0]
    torch.testing.assert_close(chosen, top, rtol=0, atol=1e-5)
    assert torch.equal(sampled[temperatures[slots.long()] > 0], first[temperatures[slots.long()] > 0])
    expected = logits.double().log_softmax(-1).gather(-1, sampled[:, None])
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=2e-5)


def test_logits_that_are_not_numbers_give_a_token() -> None:
    from dagrl.workers.vllm.sampling_kernels import sampled_tokens

    logits = torch.full((6, 5000), float("nan"), device=DEVICE)
    tokens, logprobs = sampled_tokens(logits, *sampling_state(6))
    assert bool(((tokens >= 0) & (tokens < 5000)).all())
    assert bool(logprobs.isnan().all())


@pytest.mark.skipif(INTERPRETED, reason="needs vLLM on a GPU")
@pytest.mark.parametrize("spread", [0.0, 0.6, 3.0, 30.0])
def test_tokens_are_those_of_vllm(spread: float) -> None:
    from dagrl.workers.vllm.burst_graphs import RELEASES
    from dagrl.workers.vllm.sampling_kernels import sampled_tokens

    vllm = pytest.importorskip("vllm")
    if not vllm.__version__.startswith(RELEASES):
        pytest.skip(f"vLLM {vllm.__version__} draws otherwise, and samples with its own kernel")
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits = (torch.randn(512, 151_936, device=DEVICE) * spread).bfloat16()
    slots, temperatures, seeds, positions = sampling_state(len(logits))
    for step in range(20):
        expected = gumbel_sample(logits, slots, temperatures, seeds, positions + step, apply_temperature=False)
        assert torch.equal(sampled_tokens(logits, slots, temperatures, seeds, positions + step)[0], expected), step
