"""The value loss: numbers by hand, clipping, and tokens outside the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dagrl.config import Config
from dagrl.rl.algorithm import VALUE, algorithm_for
from dagrl.rl.losses import Denominators, LossOutput, batch_loss


def output(values: Tensor, clip: float | None) -> LossOutput:
    data = {
        "loss_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0]]),
        "values": torch.tensor([[9.0, 1.0, 1.0, 1.0]]),
        "returns": torch.tensor([[float("nan"), 2.0, 0.0, 1.0]]),
    }
    config = Config.model_validate(
        {"name": "critic", "algorithm": "ppo", "data": {}, "policy": {}, "critic": {"value_clip": clip}}
    )
    return batch_loss(algorithm_for(VALUE, config), values, data, Denominators(3, 1))


def test_a_value_that_moved_too_far_towards_its_return_has_no_gradient() -> None:
    values = torch.tensor([[7.0, 1.8, 1.8, 1.2]], requires_grad=True)
    found = output(values, 0.5)
    # Kept within 0.5 of 1, the values are 1.5, 1.5 and 1.2: errors of 0.5, 1.5 and 0.2 instead of 0.2, 1.8 and 0.2.
    assert found.loss.item() == pytest.approx((0.5**2 + 1.8**2 + 0.2**2) / 6)
    (gradient,) = torch.autograd.grad(found.loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, 1.8 / 3, 0.2 / 3]]))
    sums = {name: value.item() for name, value in found.sums.items()}
    assert sums == pytest.approx(
        {
            "loss": found.loss.item(),
            "value_mean": (1.8 + 1.8 + 1.2) / 3,
            "value_error": (0.2 + 1.8 + 0.2) / 3,
            "value_clip_ratio": 1 / 3,
            "valid_tokens": 3,
        }
    )


def test_without_a_clip_it_is_half_the_mean_squared_error() -> None:
    values = torch.tensor([[7.0, 1.8, 1.8, 1.2]], requires_grad=True)
    found = output(values, None)
    assert found.loss.item() == pytest.approx((0.2**2 + 1.8**2 + 0.2**2) / 6)
    (gradient,) = torch.autograd.grad(found.loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.2 / 3, 1.8 / 3, 0.2 / 3]]))
