"""Proximal policy optimization with a critic: token advantages from a critic's values, and the loss of these values.

The policy's loss is that of `grpo` (the clipped surrogate, unless `loss_fn.name` says otherwise). `dagrl.rl.gae` has the
advantages. Sources: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equations 7 and 9;
clipped values: OpenAI Baselines' PPO2, and verl's `compute_value_loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy.typing as npt

from dagrl.rl.algorithm import Algorithm
from dagrl.rl.algorithms.grpo import Grpo

if TYPE_CHECKING:
    import numpy as np

    from dagrl.rl.advantages import Floats
    from dagrl.rl.token_losses import TokenBatch, TokenResult


class Ppo(Grpo):
    """The loss of GRPO with advantages of each token, by generalized advantage estimation (`ppo.gamma`, `ppo.lam`)."""

    critic = True

    def advantages(self, rewards: Floats, valid: npt.NDArray[np.bool_]) -> npt.ArrayLike:
        """Returns the rewards: the critic is the baseline."""
        return rewards

    def token_advantages(self, rewards: Floats, values: Floats, mask: Floats) -> tuple[npt.ArrayLike, npt.ArrayLike]:
        """Returns generalized advantages, whitened over the batch, and returns."""
        from dagrl.rl.gae import advantages_and_returns, whitened

        ppo = self.config.ppo
        advantages, returns = advantages_and_returns(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam)
        return whitened(advantages, mask), returns


class Values(Algorithm):
    """The loss of a critic, whose outputs are values of tokens in place of log-probabilities."""

    columns = {}

    def loss(self, batch: TokenBatch) -> TokenResult:
        """Returns half of `max((v - R)^2, (clip(v) - R)^2)`; `clip` keeps v within `critic.value_clip` of the old value.

        Metrics: the mean of the values and of their absolute errors, and the share of tokens with the larger clipped error.
        """
        import torch

        values, clip = batch.logprobs, self.config.critic.value_clip
        returns, old = batch.column("returns"), batch.column("values")
        inside = batch.mask > 0
        error = torch.where(inside, values - returns, 0.0)
        plain = bounded = error.square()
        if clip is not None:
            clipped = torch.minimum(torch.maximum(values, old - clip), old + clip)
            bounded = torch.where(inside, clipped - returns, 0.0).square()
        means = {"value_mean": values, "value_error": error.abs(), "value_clip_ratio": (bounded > plain).to(values.dtype)}
        return torch.maximum(plain, bounded) / 2, means
