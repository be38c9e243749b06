"""Chunked, vocabulary-parallel log-probabilities against torch's own. Threads act as workers."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dagrl.workers.train.logprobs import OutputLayer, VocabularyShard, scored_logprobs, token_logprobs

PADDED, SIZE, HIDDEN = 128, 100, 24  # 28 rows of padding, not to be counted


def leaves(*tensors: Tensor, double: bool = False) -> list[Any]:
    """Returns copies to differentiate by."""
    return [(tensor.double() if double else tensor.clone()).requires_grad_() for tensor in tensors]


keeping = pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])


@keeping
@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunks"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_log_softmax(chunk: int | None, temperature: float, keeps: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 7, HIDDEN), torch.randn(PADDED, HIDDEN)
    labels, weights = torch.randint(0, SIZE, (3, 7)), torch.randn(3, 7)

    mine, theirs = leaves(hidden, weight), leaves(hidden, weight)
    layer = OutputLayer(mine[1], VocabularyShard(0, SIZE), temperature, chunk, keeps)
    found, entropy = token_logprobs(mine[0], labels, layer)
    (found * weights).sum().backward()
    distribution = ((theirs[0] @ theirs[1].T)[..., :SIZE] / temperature).log_softmax(-1)
    expected = distribution.gather(-1, labels[..., None])[..., 0]
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(distribution.exp() * distribution).sum(-1), rtol=1e-5, atol=1e-5)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad


def test_scored_tokens_have_the_values_and_gradients_of_all_tokens() -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(3, 7, HIDDEN), torch.randn(SIZE, HIDDEN), torch.randint(0, SIZE, (3, 7))
    mask = torch.rand(3, 7) < 0.5
    found = []
    for scored in (None, mask.flatten().nonzero().flatten()):
        mine = leaves(hidden, weight)
        layer = OutputLayer(mine[1], VocabularyShard(0, SIZE))
        logprobs, entropy = scored_logprobs(mine[0], labels, scored, partial(token_logprobs, layer=layer))
        (logprobs.square() * mask).sum().backward()
        found.append([logprobs * mask, entropy * mask, mine[0].grad, mine[1].grad])
    assert not logprobs[~mask].any()
    for some, every in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(some, every, rtol=1e-5, atol=1e-6)


PARTS = [(0, 48), (48, 48), (96, 4), (100, 0)]  # (first, size) of each worker's part of `SIZE`; its other rows are padding


@keeping
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunks"])
def test_vocabulary_parallel_results_equal_those_of_one_worker(chunk: int | None, scale: float, keeps: bool) -> None:
    """Also workers with few rows or only padding. In double precision results differ only by rounding."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(21, HIDDEN).mul(scale), torch.randn(SIZE, HIDDEN)
    labels, weights, store = torch.arange(21) * 37 % SIZE, torch.randn(21), HashStore()
    labels[:4] = torch.tensor([47, 48, 95, 96])

    def run(rank: int) -> list[Tensor]:
        first, size = PARTS[rank]
        group = ProcessGroupGloo(store, rank, len(PARTS), timedelta(seconds=30))
        rows = torch.cat([weight[first : first + size], torch.full((48 - size, HIDDEN), 1e3)])
        mine = leaves(hidden, rows)
        layer = OutputLayer(mine[1], VocabularyShard(first, size, group), 0.6, chunk, keeps)
        logprobs, entropy = token_logprobs(mine[0], labels, layer)
        (logprobs * weights).sum().backward()
        assert not mine[1].grad[size:].any()
        return [logprobs.detach(), entropy, mine[0].grad, mine[1].grad[:size]]

    with ThreadPoolExecutor(len(PARTS)) as workers:
        results = list(workers.map(run, range(len(PARTS))))
    one = leaves(hidden, weight, double=True)
    distribution = (one[0] @ one[1].T / 0.6).log_softmax(-1)
    expected = distribution.gather(-1, labels[:, None])[:, 0]
    (expected * weights).sum().backward()
    for logprobs, entropy, _, _ in results:
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5 * scale)
        torch.testing.assert_close(entropy.double(), -(distribution.exp() * distribution).sum(-1), rtol=1e-3, atol=1e-5)
    _, _, of_hidden, of_weight = zip(*results, strict=True)
    torch.testing.assert_close(sum(of_hidden).double(), one[0].grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(torch.cat(of_weight).double(), one[1].grad, rtol=1e-3, atol=1e-5 * scale)


def test_extreme_logits_stay_finite() -> None:
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    found, entropy = token_logprobs(torch.ones(1, 1), torch.tensor([1]), OutputLayer(weight, VocabularyShard(0, 3)))
    found.sum().backward()
    assert found.item() == -2e4 and entropy.item() == 0
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_half_precision_gradients_accumulate_in_float32() -> None:
    """800 tokens, two at a time: a bfloat16 sum stops growing when it is 256 times the addend."""
    torch.manual_seed(0)
    hidden, weight = torch.rand(800, HIDDEN).bfloat16(), torch.zeros(SIZE, HIDDEN, dtype=torch.bfloat16)
    labels = torch.zeros(800, dtype=torch.int64)
    logprobs, _ = token_logprobs(hidden, labels, OutputLayer(weight.requires_grad_(), VocabularyShard(0, SIZE), 1.0, 2))
    logprobs.sum().backward()
    expected = hidden.double().sum(0) * (torch.nn.functional.one_hot(labels[:1], SIZE).T - 1 / SIZE)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-2, atol=0.0)


def test_gradients_of_kept_exponentials_are_as_exact_as_their_type() -> None:
    """Also of a label whose probability rounds to 1 in bfloat16."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, HIDDEN).bfloat16(), torch.randn(SIZE, HIDDEN).bfloat16()
    weight[7] = 0.9 * hidden[3]
    labels, weights = torch.randint(0, SIZE, (40,)), torch.randn(40)
    labels[3] = 7
    exact = leaves(hidden, weight, double=True)
    logits = exact[0] @ exact[1].T
    logits = logits + ((hidden @ weight.T).double() - logits).detach()  # a CPU rounds products to bfloat16
    (logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0] * weights).sum().backward()
    for keeps in (False, True):
        mine = leaves(hidden, weight)
        logprobs, _ = token_logprobs(mine[0], labels, OutputLayer(mine[1], VocabularyShard(0, SIZE), keeps=keeps))
        assert logprobs[3].exp() > 1 - 2**-9
        (logprobs * weights).sum().backward()
        for own, other in zip(mine, exact, strict=True):
            error = (own.grad.double() - other.grad).norm(dim=-1) / other.grad.norm(dim=-1)
            assert error.max() < 2**-7


@keeping
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_weight_gradients_are_added_to_megatrons_buffer(shared: bool, keeps: bool) -> None:
    torch.manual_seed(0)
    hidden, labels = torch.randn(9, HIDDEN), torch.randint(0, SIZE, (9,))
    weight = torch.nn.Parameter(torch.randn(PADDED, HIDDEN))
    layer = OutputLayer(weight, VocabularyShard(0, SIZE), keeps=keeps, shared=shared)
    token_logprobs(hidden, labels, layer)[0].sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(PADDED, HIDDEN), False  # type: ignore[attr-defined]
    token_logprobs(hidden, labels, layer)[0].sum().backward()
    assert expected is not None
    torch.testing.assert_close(weight.main_grad - 1, expected, rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]
    assert (weight.grad is None) is shared and weight.grad_added_to_main_grad is not shared  # type: ignore[attr-defined]


class _Largest(TorchDispatchMode):
    """Largest number of elements in any tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        self.elements = max([self.elements, *made])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_materialized_as_a_whole(dtype: torch.dtype) -> None:
    """In both passes the largest tensor is a chunk of logits or the output layer's gradient."""
    tokens, vocabulary, chunk = 512, 4096, 32
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 8, dtype=dtype, requires_grad=True)
    with _Largest() as largest:
        layer = OutputLayer(weight, VocabularyShard(0, vocabulary), chunk_tokens=chunk)
        logprobs, _ = token_logprobs(hidden, torch.zeros(tokens, dtype=torch.int64), layer)
        logprobs.sum().backward()
    assert largest.elements == chunk * vocabulary
