"""A critic's advantages and loss: closed forms, sums by definition, clipping, and tokens outside the mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dagrl.config import Config
from dagrl.rl.algorithm import VALUE, algorithm_for
from dagrl.rl.gae import advantages_and_returns, explained_variance, rewards_at_end, whitened
from dagrl.rl.losses import Denominators, batch_loss


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2015, equation 16: the discounted sum of the errors, each written out."""
    following = [*values, 0.0][1:]
    errors = [reward + gamma * after - value for reward, after, value in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - now) * errors[later] for later in range(now, len(errors)))
        for now in range(len(errors))
    ]


@given(seed=st.integers(0, 2**16), gamma=st.floats(0.5, 1.0), lam=st.floats(0.0, 1.0))
def test_advantages_are_the_discounted_sums_of_errors_over_the_policys_tokens(seed: int, gamma: float, lam: float) -> None:
    draw = np.random.default_rng(seed)
    mask = (draw.random((3, 9)) < 0.6).astype(np.float32)  # prompts, padding and an environment's tokens anywhere
    rewards, values = draw.normal(size=(2, 3, 9))
    advantages, returns = advantages_and_returns(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(3):
        inside = mask[row] > 0
        expected = by_definition(rewards[row][inside].tolist(), values[row][inside].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[row][inside], expected, atol=1e-12)
        np.testing.assert_allclose(returns[row][inside], expected + values[row][inside], atol=1e-12)
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()


def test_a_reward_at_the_end_is_every_tokens_return() -> None:
    """With gamma and lambda 1 the advantage is the reward minus the value, whatever the critic says of later tokens."""
    mask = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    rewards = rewards_at_end([2.0, -1.0, 5.0], mask)
    assert rewards.tolist() == [[0, 0, 0, 0, 2, 0], [0, 0, 0, 0, 0, -1], [0] * 6]
    values = np.random.default_rng(0).normal(size=mask.shape)
    advantages, returns = advantages_and_returns(rewards, values, mask, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, mask * np.array([[2.0], [-1.0], [5.0]]), atol=1e-12)
    np.testing.assert_allclose(advantages, mask * (returns - values), atol=1e-12)


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    mask = np.random.default_rng(1).random((4, 7)) < 0.5
    actual = whitened(np.random.default_rng(2).normal(3, 5, mask.shape), mask)
    assert actual[mask].mean() == pytest.approx(0, abs=1e-12)
    assert actual[mask].var(ddof=1) == pytest.approx(1, abs=1e-6)
    assert not actual[~mask].any()
    assert not whitened([[3.0, 4.0]], [[1, 0]]).any()


def test_the_variance_that_values_explain() -> None:
    returns, mask = np.array([[1.0, 2.0, 9.0]]), np.array([[1, 1, 0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns, np.zeros((1, 3)), mask) == 0.0
    assert explained_variance(np.ones((1, 3)), returns, mask) == 0.0
    values, mask = np.random.default_rng(0).normal(size=(2, 30)), np.ones((2, 30))
    _, returns = advantages_and_returns(rewards_at_end([0.3, 0.3], mask), values, mask, gamma=1.0, lam=1.0)
    assert 0 < returns.var() < 1e-30 and explained_variance(returns, values, mask) == 0.0, "returns that are equal but round"


@pytest.mark.parametrize(
    ("clip", "errors", "gradients", "clipped"),
    [
        (0.5, [0.5, 1.8, 0.2], [0.0, 1.8, 0.2], 1 / 3),  # kept within 0.5 of 1, the values are 1.5, 1.5 and 1.2
        (None, [0.2, 1.8, 0.2], [-0.2, 1.8, 0.2], 0.0),
    ],
)
def test_value_loss(clip: float | None, errors: list[float], gradients: list[float], clipped: float) -> None:
    """Half the mean squared error. A value that moved too far towards its return has no gradient."""
    values = torch.tensor([[7.0, 1.8, 1.8, 1.2]], requires_grad=True)
    data = {
        "loss_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0]]),
        "values": torch.tensor([[9.0, 1.0, 1.0, 1.0]]),
        "returns": torch.tensor([[float("nan"), 2.0, 0.0, 1.0]]),
    }
    sections = {"data": {}, "policy": {}, "critic": {"value_clip": clip}}
    config = Config.model_validate({"name": "critic", "algorithm": "ppo", **sections})
    output = batch_loss(algorithm_for(VALUE, config), values, data, Denominators(3, 1))
    loss = sum(error**2 for error in errors) / 6
    (gradient,) = torch.autograd.grad(output.loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, *gradients]]) / 3)
    expected = {
        "loss": loss,
        "value_mean": (1.8 + 1.8 + 1.2) / 3,
        "value_error": (0.2 + 1.8 + 0.2) / 3,
        "value_clip_ratio": clipped,
        "valid_tokens": 3,
    }
    assert {name: value.item() for name, value in output.sums.items()} == pytest.approx(expected)
