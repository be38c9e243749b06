"""Attention of packed sequences by cuDNN: its operator, and where it is chosen. A double computes in its place."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dagrl.workers.train import cudnn_attention as cudnn
from dagrl.workers.train.cudnn_attention import cudnn_attention, faster

LENGTHS, KEY_LENGTHS, HEADS, KV_HEADS, SIZE = (3, 1, 6), (5, 1, 9), 4, 2, 8


def probabilities(
    query: Tensor, key: Tensor, starts: Tensor, key_starts: Tensor, scale: float, end: bool, window: int | None = None
) -> Tensor:
    """Returns those of all queries and keys, [heads, queries, keys]: a softmax over the keys that are seen."""
    at, key_at = (torch.arange(int(one[-1]), device=query.device) for one in (starts, key_starts))
    segment, key_segment = (
        torch.searchsorted(one, where, right=True) for one, where in ((starts, at), (key_starts, key_at))
    )
    first = (key_starts[segment] - starts[segment]) if end else (key_starts[segment - 1] - starts[segment - 1])
    last = (at + first)[:, None]
    seen = (segment[:, None] == key_segment) & (key_at <= last) & (key_at > last - (window or len(key)))
    scores = scale * torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def plain(query: Tensor, key: Tensor, value: Tensor, *segments: Any) -> Tensor:
    values = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", probabilities(query, key, *segments), values)


def execute(backward: bool, tensors: dict[int, Tensor], starts: Tensor, key_starts: Tensor, *sizes: Any) -> None:
    """Fills in what cuDNN would."""
    leaves = [tensors[each].detach().requires_grad_(backward) for each in (cudnn.QUERY, cudnn.KEY, cudnn.VALUE)]
    with torch.enable_grad():
        out = plain(*leaves, starts, key_starts, *sizes[2:])
    if not backward:
        tensors[cudnn.OUT].copy_(out)
        return
    gradients = torch.autograd.grad(out, leaves, tensors[cudnn.GRAD])
    for place, gradient in zip((cudnn.GRAD_QUERY, cudnn.GRAD_KEY, cudnn.GRAD_VALUE), gradients, strict=True):
        tensors[place].copy_(gradient)


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


@pytest.mark.parametrize("end", [False, True])
def test_outputs_and_gradients_are_those_of_plain_attention(end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_execute", execute)
    key_lengths = KEY_LENGTHS if end else LENGTHS
    shapes = (sum(LENGTHS), HEADS), (sum(key_lengths), KV_HEADS), (sum(key_lengths), KV_HEADS)
    leaves = [torch.randn(SIZE, heads, tokens).permute(2, 1, 0).requires_grad_() for tokens, heads in shapes]  # no rows
    starts = starts_of(LENGTHS), starts_of(key_lengths)
    grad = torch.randn(sum(LENGTHS), HEADS, SIZE)
    expected = plain(*leaves, *starts, 0.3, end)
    found = cudnn_attention(*leaves, *starts, max(LENGTHS), max(key_lengths), 0.3, end)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(out, leaves, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_chosen_for_what_it_computes_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "available", lambda device: True)
    for tokens, size, kind, chosen in (
        (16384, 128, torch.bfloat16, True),
        (1024, 128, torch.bfloat16, False),
        (16384, 256, torch.bfloat16, False),
        (16384, 100, torch.bfloat16, False),
        (16384, 128, torch.float32, False),
    ):
        assert faster(torch.empty(tokens, 8, size, dtype=kind, device="meta"), tokens) is chosen, (tokens, size, kind)


def test_packed_rows_of_fsdp_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from dagrl.workers.fsdp import attention

    monkeypatch.setattr(cudnn, "_execute", execute)
    monkeypatch.setattr(attention, "faster", lambda query, longest: longest == 8)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts = starts_of(LENGTHS)
    sizes = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8, "max_length_k": 8}
    found, _ = attention.attend(SimpleNamespace(is_causal=True), query, key, value, None, 0.3, **sizes)
    expected = plain(*(one[0].transpose(0, 1) for one in (query, key, value)), starts, starts, 0.3, False)
    torch.testing.assert_close(found[0], expected)


def test_a_front_end_without_plans_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fail = Mock(side_effect=TypeError("sdpa() got an unexpected keyword argument"))
    device = torch.device("cuda", 99)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cudnn, "find_spec", lambda name: object())
    monkeypatch.setattr(cudnn, "_plan", fail)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=lambda: cudnn.OLDEST_CUDNN))
    assert not cudnn.available(device)
    assert "FlashAttention 2 computes packed sequences, as cuDNN's front end does not work: sdpa() got" in caplog.text
