"""pass@k: the probability that at least one of k samples of a prompt is right."""

from __future__ import annotations

from math import comb


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Returns the unbiased estimate from `right` of `samples` samples: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1. Raises
    ValueError unless 1 <= k <= samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; expected 1 to {samples}, the number of samples")
    return 1.0 - comb(samples - right, k) / comb(samples, k)
