"""Generalized advantage estimates of PPO, on the driver: from rewards and a critic's values to advantages and returns.

All arrays are token aligned, [rows, tokens]; `mask` is 1 on the tokens that the policy made. Tokens of an environment lie
between them and are skipped: the state after a policy token is the one before the next policy token.

Sources: Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
arXiv:1506.02438, equations 11 and 16; Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, for the reward at the last token.
verl's `compute_gae_advantage_return` computes the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WHITEN_EPSILON = 1e-8
"""Added to the variance, as in verl's `masked_whiten`."""

ROUNDING = 1e-12
"""Variance of equal returns, at most, as a share of their mean square: each is a sum in another order."""


def rewards_at_end(rewards: npt.ArrayLike, mask: npt.ArrayLike) -> Floats:
    """Returns each row's reward [rows] at its last token in the mask, 0 elsewhere. Rows without a token get none."""
    inside = np.asarray(mask) > 0
    table = np.zeros(inside.shape)
    rows = np.flatnonzero(inside.any(axis=1))
    last = inside.shape[1] - 1 - np.argmax(inside[:, ::-1], axis=1)
    table[rows, last[rows]] = np.asarray(rewards, np.float64)[rows]
    return table


def advantages_and_returns(
    rewards: npt.ArrayLike, values: npt.ArrayLike, mask: npt.ArrayLike, *, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """Returns advantages and the returns that the critic learns, both 0 outside the mask.

    With the error d_t = r_t + gamma V_(t+1) - V_t, advantages are A_t = d_t + gamma lam A_(t+1), and returns A_t + V_t. The
    state after the last token has the value 0.
    """
    reward, value = (np.ascontiguousarray(np.asarray(table).T, np.float64) for table in (rewards, values))
    inside = np.ascontiguousarray(np.asarray(mask).T > 0)  # [tokens, rows]: a token's rows are next to each other
    advantages, returns = np.zeros((2, *inside.shape))
    following, advantage = np.zeros((2, inside.shape[1]))
    for token in np.flatnonzero(inside.any(axis=1))[::-1].tolist():
        here = inside[token]
        estimate = reward[token] + gamma * following - value[token] + gamma * lam * advantage
        np.copyto(advantage, estimate, where=here)
        np.copyto(following, value[token], where=here)
        np.copyto(advantages[token], advantage, where=here)
        np.add(advantage, following, out=returns[token], where=here)
    return np.ascontiguousarray(advantages.T), np.ascontiguousarray(returns.T)


def whitened(advantages: npt.ArrayLike, mask: npt.ArrayLike) -> Floats:
    """Returns advantages with mean 0 and variance 1 (n - 1) over the mask, 0 outside. Fewer than two tokens become 0."""
    inside, table = np.asarray(mask) > 0, np.asarray(advantages, np.float64)
    chosen = table[inside]
    if len(chosen) < 2:
        return np.zeros(table.shape)
    return np.where(inside, (table - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + WHITEN_EPSILON), 0.0)


def explained_variance(returns: npt.ArrayLike, values: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """Returns the share of the returns' variance that values explain: 1 if equal, 0 for constant values or equal returns."""
    inside = np.asarray(mask) > 0
    target, value = np.asarray(returns, np.float64)[inside], np.asarray(values, np.float64)[inside]
    if not len(target) or target.var() <= ROUNDING * np.square(target).mean():
        return 0.0
    return float(1.0 - (target - value).var() / target.var())
