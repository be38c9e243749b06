"""Our kernels of decode steps, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels import DEVICE, kernel_tests

pytest.importorskip("triton")
pytestmark = kernel_tests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1000, 20100])
def test_sampled_tokens_are_scored(size: int, dtype: torch.dtype) -> None:
    """Rows of a wider matrix, with tokens that top-p has removed: part of a row, whole tiles, all but one."""
    from dagrl.workers.vllm.logprob_kernels import sampled_scores

    logits = (torch.randn(6, size + 60, device=DEVICE) * 3).to(dtype)[:, :size]
    logits[1, 5:] = logits[2, 1:-1] = logits[3, :-1] = float("-inf")
    tokens = torch.tensor([size // 2, 3, size - 1, size - 1, 0, 7], device=DEVICE)
    logprobs, ranks = sampled_scores(logits, tokens)
    chosen = logits.gather(-1, tokens[:, None])
    expected = chosen.double() - logits.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
    assert ranks.tolist() == (logits >= chosen).sum(-1).tolist()
