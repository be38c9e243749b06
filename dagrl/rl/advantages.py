"""Advantages of completions, against the others of their prompt or batch, and of tokens, against a critic's values.

Those of completions (`advantage.name`) are `[prompts, generations]`; a row is the group of a prompt. Those of tokens are
PPO's generalized advantage estimates, `[rows, tokens]`; `mask` is 1 on the tokens that the policy made. Tokens of an
environment lie between them and are skipped: the state after a policy token is the one before the next policy token.

Sources: the group mean and the division by the group's standard deviation are GRPO's (Shao et al. 2024, "DeepSeekMath",
arXiv:2402.03300, section 4.1.2); the leave-one-out baseline is from Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a
Baseline for Free!", and RLOO (Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740); whitening over the batch is
REINFORCE++'s (Hu et al. 2025, arXiv:2501.03262, section 3). Estimates of tokens: Schulman et al. 2015, "High-Dimensional
Continuous Control Using Generalized Advantage Estimation", arXiv:1506.02438, equations 11 and 16; Ouyang et al. 2022
(InstructGPT), arXiv:2203.02155, for the reward at the last token. verl's `compute_gae_advantage_return` computes the same.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dagrl.config import AdvantageConfig, Config
from dagrl.errors import ConfigError, DataError
from dagrl.imports import check_arguments, load_named, running

Floats = npt.NDArray[np.float64]

AdvantageFunction = Callable[..., npt.ArrayLike]
"""`function(rewards [prompts, generations], valid [prompts, generations], **args)` returns advantages of the same shape."""

EPSILON = 1e-6  # added to standard deviations, as in NeMo-RL and verl

GROUP, BATCH = "group", "batch"
KEY = "advantage.name"

WHITEN_EPSILON = 1e-8  # added to the variance, as in verl's `masked_whiten`
ROUNDING = 1e-12  # variance of equal returns, at most, as a share of their mean square: each is a sum in another order


def configured_advantages(config: Config, rewards: npt.ArrayLike, valid: npt.ArrayLike) -> Floats:
    """Returns the advantages that `advantage.name` computes: `[prompts, generations]` float64, 0 where not `valid`.

    Raises ConfigError if a user's function fails, or returns another shape or values that are not finite.
    """
    table, mask, chosen = checked_rewards(rewards), np.asarray(valid, np.bool_), config.advantage
    if chosen.name == GROUP:
        return group_advantages(
            table, leave_one_out=config.grpo.use_leave_one_out_baseline, normalize=config.grpo.normalize_rewards, valid=mask
        )
    if chosen.name == BATCH:
        return batch_advantages(table, mask)
    function = advantage_function(chosen)
    with running(chosen.name, KEY):
        advantages = function(np.where(mask, table, 0.0), mask, **chosen.args)
    return checked_advantages(advantages, mask, f"{KEY}: {chosen.name}")


def checked_advantages(advantages: npt.ArrayLike, valid: npt.NDArray[np.bool_], what: str) -> Floats:
    """Returns the advantages that `what` computed, 0 where not `valid`. Raises ConfigError for another shape or NaN."""
    table = np.asarray(advantages, np.float64)
    if table.shape != valid.shape or not np.isfinite(table).all():
        raise ConfigError(
            f"{what} returned advantages of shape {list(table.shape)}, finite: {bool(np.isfinite(table).all())}; expected: "
            f"a finite advantage for each generation, {list(valid.shape)}"
        )
    return np.where(valid, table, 0.0)


def advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    """Returns the user's function. Raises ConfigError if there is none, or if it does not take `advantage.args`."""
    function = load_named(config.name, (GROUP, BATCH), KEY)
    check_arguments(function, config.args, config.name, "advantage.args", positional=["rewards", "valid"])
    return function


def group_advantages(
    rewards: npt.ArrayLike, *, leave_one_out: bool, normalize: bool, valid: npt.ArrayLike | None = None
) -> Floats:
    """Returns the advantage of each generation, its reward minus its group's baseline: `[prompts, generations]` float64.

    The baseline is the mean of the group, or with `leave_one_out` the mean of the *other* generations of the group, which
    keeps the policy gradient unbiased. With `normalize`, advantages are divided by the sample standard deviation (n - 1) of
    the whole group, plus `EPSILON`. With `leave_one_out` it is that of the other generations, as in NeMo-RL; where it is 0,
    as for the only winner of a group, the advantage is not divided. If all rewards of a group are equal, its advantages are
    exactly 0.

    Generations outside the mask `valid` have unknown rewards. Their advantage is 0, and baseline and deviation ignore them.
    In a group with fewer than two valid generations, all advantages are 0.

    Example: rewards `[[0, 0, 0, 1]]` give `[[-.25, -.25, -.25, .75]]`, and with leave-one-out `[[-1/3, -1/3, -1/3, 1]]`.

    Raises DataError if `rewards` has another shape, groups of one, or values that are not finite.
    """
    table = checked_rewards(rewards)
    mask = np.ones(table.shape, np.bool_) if valid is None else np.asarray(valid, np.bool_)
    others = np.maximum(mask.sum(axis=1, keepdims=True) - 1, 1)  # [prompts, 1]; groups of one become 0 below
    mean = np.where(mask, table, 0.0).sum(axis=1, keepdims=True) / (others + 1)
    centered: Floats = np.where(mask, table - mean, 0.0)
    squares = (centered**2).sum(axis=1, keepdims=True)
    scale = (others + 1) / others if leave_one_out else 1.0  # r - mean(others) = (r - mean(all)) n / (n - 1)
    advantages: Floats = centered * scale
    if normalize and leave_one_out:
        deviation = _deviation_of_others(table, mask)
        advantages = np.where(deviation > 0, advantages / (deviation + EPSILON), advantages)
    elif normalize:
        advantages = advantages / (np.sqrt(squares / others) + EPSILON)
    advantages = np.where(mask, advantages, 0.0)
    advantages[zero_variance_groups(table, mask)] = 0.0  # the mean of equal floats may differ from them by rounding
    return advantages


def _deviation_of_others(table: Floats, mask: npt.NDArray[np.bool_]) -> Floats:
    """Returns the sample standard deviation of the other valid rewards of each generation's group; 0 if they are equal."""
    others = mask[:, None, :] & ~np.eye(table.shape[1], dtype=np.bool_)  # [prompts, generations, generations]
    count, rewards = others.sum(-1), np.broadcast_to(table[:, None, :], others.shape)
    mean = np.sum(rewards, -1, where=others) / np.maximum(count, 1)
    squares = np.sum((rewards - mean[..., None]) ** 2, -1, where=others)
    low, high = np.min(rewards, -1, where=others, initial=np.inf), np.max(rewards, -1, where=others, initial=-np.inf)
    equal = high <= low  # then the mean may differ by rounding, which would divide by almost nothing
    return np.where(equal, 0.0, np.sqrt(squares / np.maximum(count - 1, 1)))


def batch_advantages(rewards: npt.ArrayLike, valid: npt.ArrayLike) -> Floats:
    """Returns the advantages of REINFORCE++-baseline: rewards less their group's mean, whitened over the batch's valid
    generations, `[prompts, generations]`. The deviation is the sample one, as in verl.
    """
    table, mask = checked_rewards(rewards), np.asarray(valid, np.bool_)
    counts = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    table = table - np.where(mask, table, 0.0).sum(axis=1, keepdims=True) / counts
    inside = table[mask]
    if len(inside) < 2:
        return np.zeros(table.shape)
    advantages: Floats = np.where(mask, (table - inside.mean()) / (inside.std(ddof=1) + EPSILON), 0.0)
    return advantages


def zero_variance_groups(rewards: npt.ArrayLike, valid: npt.ArrayLike | None = None) -> npt.NDArray[np.bool_]:
    """Returns which groups have equal rewards in all valid generations, or fewer than two valid ones: `[prompts]` bool."""
    table = np.asarray(rewards, dtype=np.float64)
    mask = np.ones(table.shape, np.bool_) if valid is None else np.asarray(valid, np.bool_)
    spread: npt.NDArray[np.bool_] = np.where(mask, table, -np.inf).max(axis=1) <= np.where(mask, table, np.inf).min(axis=1)
    return spread


def checked_rewards(rewards: npt.ArrayLike, least: int = 2) -> Floats:
    """Returns rewards as a table. Raises DataError unless they are finite, `[prompts, at least `least` generations]`."""
    table = np.array(rewards, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < least:
        raise DataError(
            f"rewards have the shape {list(table.shape)}; expected: [prompts, generations] with at least {least} "
            "generations per prompt. Raise grpo.num_generations_per_prompt"
        )
    if not np.isfinite(table).all():
        prompt, generation = np.argwhere(~np.isfinite(table))[0].tolist()
        raise DataError(
            f"the reward of prompt {prompt}, generation {generation} is {table[prompt, generation]}; "
            "expected: a finite number. Fix the reward function"
        )
    return table


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
