"""Advantages: how much better a generation was than the other generations of its prompt.

Everything is `[prompts, generations]`: one row is one prompt's group.

Sources: the group mean and the division by the group's standard deviation are GRPO's (Shao et al. 2024, "DeepSeekMath",
arXiv:2402.03300, section 4.1.2); the leave-one-out baseline is that of Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a
Baseline for Free!", and of RLOO (Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagrl.errors import DataError

Floats = npt.NDArray[np.float64]

STD_EPSILON = 1e-6  # as NeMo-RL: a group of almost equal rewards is not blown up without bound


def group_advantages(rewards: npt.ArrayLike, *, leave_one_out: bool, normalize: bool) -> Floats:
    """Advantage of each generation, `[prompts, generations]` float64: its reward minus its group's baseline.

    The baseline is the mean of the group, or with `leave_one_out` the mean of the *other* generations of the group, which
    keeps the policy gradient unbiased. With `normalize`, advantages are divided by the group's standard deviation (sample
    standard deviation, n - 1, of the whole group). A group whose rewards are all equal teaches nothing: exactly 0.

    Example: rewards `[[0, 0, 0, 1]]` give `[[-.25, -.25, -.25, .75]]`, and with leave-one-out `[[-1/3, -1/3, -1/3, 1]]`.

    Raises DataError when `rewards` has another shape, has groups of one, or has values that are not finite.
    """
    table = _checked(rewards)
    advantages: Floats = table - table.mean(axis=1, keepdims=True)
    if leave_one_out:
        # r - mean(others) = (r - mean(all)) n / (n - 1)
        advantages *= table.shape[1] / (table.shape[1] - 1)
    if normalize:
        advantages /= table.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON
    advantages[zero_variance_groups(table)] = 0.0  # exactly: the mean of equal floats may differ from them by rounding
    return advantages


def zero_variance_groups(rewards: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which groups have equal rewards throughout, `[prompts]` bool."""
    table = np.asarray(rewards, dtype=np.float64)
    spread: npt.NDArray[np.bool_] = table.max(axis=1) == table.min(axis=1)
    return spread


def _checked(rewards: npt.ArrayLike) -> Floats:
    table = np.array(rewards, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2:
        raise DataError(
            f"rewards have the shape {list(table.shape)}; expected [prompts, generations] with at least 2 generations "
            "of each prompt. Raise grpo.num_generations_per_prompt"
        )
    if not np.isfinite(table).all():
        prompt, generation = np.argwhere(~np.isfinite(table))[0].tolist()
        raise DataError(
            f"the reward of prompt {prompt}, generation {generation} is {table[prompt, generation]}; "
            "expected a finite number. Mend the reward function"
        )
    return table
