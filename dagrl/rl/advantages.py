"""Advantages: how much better a completion is than the others of its prompt.

Arrays are `[prompts, generations]`; a row is the group of a prompt.

Sources: the group mean and the division by the group's standard deviation are GRPO's (Shao et al. 2024, "DeepSeekMath",
arXiv:2402.03300, section 4.1.2); the leave-one-out baseline is from Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a
Baseline for Free!", and RLOO (Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagrl.errors import DataError

Floats = npt.NDArray[np.float64]

STD_EPSILON = 1e-6  # as in NeMo-RL; bounds the advantages of almost equal rewards


def group_advantages(
    rewards: npt.ArrayLike, *, leave_one_out: bool, normalize: bool, valid: npt.ArrayLike | None = None
) -> Floats:
    """Returns the advantage of each generation, its reward minus its group's baseline: `[prompts, generations]` float64.

    The baseline is the mean of the group, or with `leave_one_out` the mean of the *other* generations of the group, which
    keeps the policy gradient unbiased. With `normalize`, advantages are divided by the group's standard deviation (the
    sample standard deviation, n - 1, of the whole group). If all rewards of a group are equal, its advantages are exactly 0.

    Generations outside the mask `valid` have unknown rewards. Their advantage is 0, and baseline and deviation ignore them.
    In a group with fewer than two valid generations, all advantages are 0.

    Example: rewards `[[0, 0, 0, 1]]` give `[[-.25, -.25, -.25, .75]]`, and with leave-one-out `[[-1/3, -1/3, -1/3, 1]]`.

    Raises DataError if `rewards` has another shape, groups of one, or values that are not finite.
    """
    table = _checked(rewards)
    mask = np.ones(table.shape, np.bool_) if valid is None else np.asarray(valid, np.bool_)
    others = np.maximum(mask.sum(axis=1, keepdims=True) - 1, 1)  # [prompts, 1]; groups of one become 0 below
    mean = np.where(mask, table, 0.0).sum(axis=1, keepdims=True) / (others + 1)
    advantages: Floats = np.where(mask, table - mean, 0.0)
    deviation = np.sqrt((advantages**2).sum(axis=1, keepdims=True) / others)
    if leave_one_out:
        # r - mean(others) = (r - mean(all)) n / (n - 1)
        advantages *= (others + 1) / others
    if normalize:
        advantages /= deviation + STD_EPSILON
    advantages[zero_variance_groups(table, mask)] = 0.0  # the mean of equal floats may differ from them by rounding
    return advantages


def zero_variance_groups(rewards: npt.ArrayLike, valid: npt.ArrayLike | None = None) -> npt.NDArray[np.bool_]:
    """Returns which groups have equal rewards in all valid generations, or fewer than two valid ones: `[prompts]` bool."""
    table = np.asarray(rewards, dtype=np.float64)
    mask = np.ones(table.shape, np.bool_) if valid is None else np.asarray(valid, np.bool_)
    spread: npt.NDArray[np.bool_] = np.where(mask, table, -np.inf).max(axis=1) <= np.where(mask, table, np.inf).min(axis=1)
    return spread


def _checked(rewards: npt.ArrayLike) -> Floats:
    table = np.array(rewards, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2:
        raise DataError(
            f"rewards have the shape {list(table.shape)}; expected: [prompts, generations] with at least 2 generations "
            "per prompt. Raise grpo.num_generations_per_prompt"
        )
    if not np.isfinite(table).all():
        prompt, generation = np.argwhere(~np.isfinite(table))[0].tolist()
        raise DataError(
            f"the reward of prompt {prompt}, generation {generation} is {table[prompt, generation]}; "
            "expected: a finite number. Fix the reward function"
        )
    return table
