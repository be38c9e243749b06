"""pass@k, the probability that at least one of k samples of a prompt is right, and the interval of a share.

`gain` pairs two models by prompt, which tells smaller differences apart than comparing their intervals does.
"""

from collections.abc import Sequence
from math import comb, sqrt

Z = 1.959964  # standard deviations of a normal distribution around its mean that hold 95 % of it


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Returns the unbiased estimate from `right` of `samples` samples: 1 - C(n - c, k) / C(n, k).

    1 <= k <= n. Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def interval(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share that was found in `count` independent trials.

    For the mean of `count` values between 0 and 1, such as pass@k of prompts, it is at least as wide as it need be. Source:
    Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    shrink = 1 + Z * Z / count
    center = (share + Z * Z / (2 * count)) / shrink
    half = Z / shrink * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(0.0, center - half), min(1.0, center + half)


def with_interval(name: str, share: float, count: int) -> dict[str, float]:
    """Returns the share as `name`, and its interval as `<name>_low` and `<name>_high`."""
    low, high = interval(share, count)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def gain(name: str, before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Returns by how much the mean share of right completions of the same prompts grew, as `name`, and its 95 % interval.

    `before` and `after` have the share of each prompt. The interval is that of a normal distribution around the mean of the
    differences. `<name>_p` is the probability of a difference at least as large if both models were equally good (the exact
    test of McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages"): of
    the prompts on which they differ, either one is ahead like a coin's side.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean = sum(differences) / len(differences)
    half = Z * sqrt(sum((one - mean) ** 2 for one in differences)) / len(differences)
    ahead, behind = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    count = ahead + behind
    chance = 2 * sum(comb(count, fewer) for fewer in range(min(ahead, behind) + 1)) / 2**count
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half, f"{name}_p": min(1.0, chance)}
