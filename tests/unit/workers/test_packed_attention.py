"""Attention of packed rows that share prefixes, as of one sequence at a time, and by cuDNN, as plain math."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config import FsdpConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.workers.fsdp import attention
from dagrl.workers.fsdp.attention import TORCH_VARLEN
from dagrl.workers.fsdp.model import HiddenStates, prepare_layer
from dagrl.workers.fsdp.separation import shares_prefixes, unshared
from dagrl.workers.train import cudnn_attention as cudnn, prefix_attention
from dagrl.workers.train.cudnn_attention import cudnn_attention, faster
from dagrl.workers.train.microbatches import split_batch
from dagrl.workers.train.row_plans import ParallelRank, SplitRule
from tests.unit.workers.test_fsdp_model import tiny

RULE = SplitRule(packed=True, rows=0, tokens=64, least_shared=0.0, by_row=True)
RANK = ParallelRank(ParallelLayout(), ParallelLayout().coordinates(0), None, None, torch.device("cpu"))


def group_batch() -> Batch:
    """Three prompts with completions of different lengths."""
    generator, width = np.random.default_rng(5), 24
    prompts, lengths = np.array([12] * 3 + [9] * 3 + [15] * 2), np.array([22, 13, 17, 12, 21, 9, 20, 16])
    tokens, places = generator.integers(1, 200, (8, width)), np.arange(width)
    for row in (1, 2, 4, 5, 7):
        tokens[row, : prompts[row]] = tokens[row - 1, : prompts[row]]
    mask = ((places >= prompts[:, None]) & (places < lengths[:, None])).astype(np.float32)
    return Batch({"tokens": tokens * (places < lengths[:, None]), "lengths": lengths, "loss_mask": mask})


def logits_of(kind: str) -> Any:
    """Returns a model in which attention matters."""
    model = tiny(kind).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    for part in (model.config, *model.modules()):
        if getattr(part, "sliding_window", None):
            part.sliding_window = 8
    return model


def shared_loss(root: Any, batch: Batch) -> Tensor:
    head, loss = root.net.get_output_embeddings(), torch.zeros(())
    cut = split_batch(batch, RULE, RANK)
    assert sum(cut.saved) > 0.1 * batch["lengths"].sum()
    for item in cut.items:
        hidden = root(item.tokens, item.positions, item.segments)
        logprobs = head(hidden).log_softmax(-1).gather(-1, item.labels[..., None])[..., 0]
        loss = loss - (logprobs * item.data["loss_mask"]).sum()
    return loss


def plain_loss(model: Any, batch: Batch) -> Tensor:
    loss = torch.zeros(())
    for row, length, mask in zip(batch["tokens"], batch["lengths"], batch["loss_mask"], strict=True):
        tokens = torch.from_numpy(row[:length])[None]
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        logprobs = model.get_output_embeddings()(hidden[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]
        loss = loss - (logprobs * torch.from_numpy(mask[1:length])).sum()
    return loss


def check(model: Any, plain: Any, root: Any, batch: Batch) -> None:
    count = float(batch["loss_mask"].sum())
    plain.set_attn_implementation("eager")
    found, expected = shared_loss(root, batch) / count, plain_loss(plain, batch) / count
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    found.backward()
    expected.backward()
    for (name, one), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if other[1].grad is not None:
            scale = float(other[1].grad.abs().max())
            torch.testing.assert_close(one.grad / scale, other[1].grad / scale, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [*((kind, "sdpa") for kind in ("qwen3", "gemma3_text", "phi", "qwen3_moe")), ("qwen3", "eager"), ("gemma2", "eager")],
)
def test_losses_and_gradients_are_those_of_single_sequences(kind: str, attention: str) -> None:
    model = logits_of(kind)
    model.set_attn_implementation(attention)
    root = HiddenStates(model)
    assert shares_prefixes(root, torch.device("cpu"))
    check(model, deepcopy(model), root, group_batch())


def parts(starts: Tensor, key_starts: Tensor, causal: bool, left: int | None) -> Iterator[Any]:
    """Yields each segment's queries, keys, and which key a query sees."""
    for (start, stop), (first, last) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        seen = torch.ones(stop - start, last - first, dtype=torch.bool)
        if causal:
            seen = seen.tril(last - first - (stop - start))
        if left is not None:
            seen = seen.triu(last - first - (stop - start) - left)
        yield slice(start, stop), slice(first, last), seen


def flash_forward(q: Tensor, k: Tensor, v: Tensor, sizes: Any, causal: bool, scale: float, left: int | None = None) -> Any:
    """Stands for the GPU's kernel, by plain math; [tokens, heads, d]."""
    groups, outs, sums = q.shape[1] // k.shape[1], [], []
    for own, keys, seen in parts(*sizes[:2], causal, left):
        key, value = (one[keys].repeat_interleave(groups, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], key) * scale
        lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        shares = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", shares, value))
        sums.append(torch.where(lse.isinf(), torch.inf, lse))
    outs.append(torch.zeros_like(q[int(sizes[0][-1]) :]))  # padding
    return torch.cat(outs), torch.cat(sums, 1), torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)


def flash_backward(saved: tuple[Tensor, ...], sizes: Any, causal: bool, scale: float) -> Any:
    """Stands for the GPU's kernel: gradients from the output and the log-sum-exp that it is given."""
    grad, q, k, v, out, lse, *_ = saved
    groups, gradients = q.shape[1] // k.shape[1], tuple(torch.zeros_like(one) for one in (q, k, v))
    for own, keys, seen in parts(*sizes[:2], causal, None):
        key, value = (one[keys].repeat_interleave(groups, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], key) * scale
        shares = torch.where(seen, (scores - lse[:, own, None]).exp(), 0.0)
        mean = (grad[own] * out[own]).sum(-1).T[..., None]
        slopes = shares * (torch.einsum("qhd,khd->hqk", grad[own], value) - mean) * scale
        gradients[0][own] += torch.einsum("hqk,khd->qhd", slopes, key)
        for target, weights, states in ((1, slopes, q), (2, shares, grad)):
            gradients[target][keys] += torch.einsum("hqk,qhd->khd", weights, states[own]).unflatten(1, (-1, groups)).sum(2)
    return gradients


def flash_operator(
    q: Tensor, k: Tensor, v: Tensor, *sizes: Any, scale: float, is_causal: bool, window_size_left: Any = None, **_: Any
) -> Any:
    return flash_forward(q, k, v, sizes, is_causal, scale, window_size_left)


def join(own: Tensor, own_lse: Tensor, seen: Tensor, seen_lse: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(own_lse, torch.where(seen_lse.isinf(), -torch.inf, seen_lse))
    sees = ~seen_lse.isinf()
    shares = (own_lse - lse).exp(), torch.where(sees, (seen_lse - lse).exp(), 0.0)
    return own * shares[0].T[..., None] + seen * shares[1].T[..., None], lse


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "_flash_forward", flash_forward)
    monkeypatch.setattr(prefix_attention, "_flash_backward", flash_backward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_operator)
    kernels = SimpleNamespace(join_attention=join)
    monkeypatch.setitem(sys.modules, "dagrl.workers.train.attention_kernels", kernels)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("recomputes", ["none", "selective"])
@pytest.mark.usefixtures("kernels")
def test_kernels_for_variable_lengths_give_the_same(kind: str, recomputes: Any) -> None:
    """Two launches are joined, or one has a prefix's keys before those of each sequence, for windows."""
    model = logits_of(kind)
    model.set_attn_implementation(TORCH_VARLEN)
    plain, root = deepcopy(model), HiddenStates(model)
    for layer in model.model.layers:
        prepare_layer(layer, FsdpConfig(activation_checkpointing=recomputes), compiles=False)
    assert shares_prefixes(root, torch.device("cpu"))
    check(model, plain, root, group_batch())


@pytest.mark.parametrize("broken", ["sequences", "positions", "kernel"])
def test_a_model_that_does_not_share_prefixes_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose completions do not see their prefix, with positions of the row, or with a kernel that takes no masks."""
    model = logits_of("qwen3")
    model.set_attn_implementation("flex_attention" if broken == "kernel" else "sdpa")
    if broken == "sequences":
        monkeypatch.setattr("dagrl.workers.fsdp.model.shared_masks", lambda *_: nullcontext())
    elif broken == "positions":
        plain = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda states, positions: plain(states, torch.arange(states.shape[1])[None])
    assert not shares_prefixes(HiddenStates(model), torch.device("cpu"))


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention", "kernels-community/sage_attention"])
def test_kernels_without_whole_masks_share_no_prefixes(kernel: str) -> None:
    model, reason = logits_of("qwen3"), f"attn_implementation {kernel}, which takes no whole masks"
    assert unshared(type(model), model.config, kernel, images=False) == reason


# By cuDNN: its operator, and where it is chosen. A double computes in its place.


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
