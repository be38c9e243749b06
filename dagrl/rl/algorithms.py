"""The algorithms that are shipped. Each is a class as in a user's own file (`dagrl.rl.algorithm`).

`dagrl.rl.token_losses`, `dagrl.rl.advantages` and `dagrl.rl.losses` have the formulas of GRPO's and PPO's parts, and their
sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy.typing as npt

from dagrl.config.roles import TEACHER
from dagrl.rl.algorithm import Algorithm
from dagrl.rl.preferences import Pairs, PreferenceAlgorithm, compared

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dagrl.rl.advantages import Floats
    from dagrl.rl.token_losses import TokenBatch, TokenLossFunction, TokenResult


class Sft(Algorithm):
    """Supervised fine-tuning: the mean negative log-likelihood of the tokens that are learned."""

    learns_from = "demonstrations"
    columns = {}

    def loss(self, batch: TokenBatch) -> TokenResult:
        """Returns minus the log-probability."""
        return -batch.logprobs


class Grpo(Algorithm):
    """GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, equations 3 and 4) and its relatives, as `loss_fn` says.

    The token loss `loss_fn.name`, weighted, plus `reference_policy_kl_penalty` times the KL to the reference policy.

    With `use_importance_sampling_correction`, a token's cost is weighted by exp(prev_logprob - generation_logprob) (see
    `dagrl.rl.losses.importance_weights`). With `force_on_policy_ratio`, prev_logprob is logprob itself: every ratio is 1.
    Metrics: those of the token loss, `policy_loss` and `policy/kl` (before the penalty), `sampling_importance_ratio`,
    `is_oob_ratio` (tokens whose importance weight was bounded or masked).
    """

    @property
    def columns(self) -> Mapping[str, str]:
        """The policy's log-probabilities, unless they are those of training itself, and the reference policy's."""
        loss = self.config.loss_fn
        columns = {} if loss.force_on_policy_ratio else {"prev_logprobs": "logprobs"}
        if TEACHER in self.config.models:
            return {**columns, "reference_logprobs": "teacher_logprobs"}
        if loss.reference_policy_kl_penalty > 0:
            return {**columns, "reference_logprobs": "reference_logprobs"}
        return columns

    @property
    def average(self) -> Literal["tokens", "sequences", "sums"]:
        """Over tokens (DAPO), over sequences (DeepSeekMath), or of sums with a constant divisor (Dr.GRPO)."""
        loss = self.config.loss_fn
        if loss.token_level_loss:
            return "tokens"
        return "sequences" if loss.sequence_length_divisor is None else "sums"

    def loss(self, batch: TokenBatch) -> TokenResult:
        """Returns the token loss with its weight and penalty."""
        from dagrl.rl.losses import kl_penalty
        from dagrl.rl.token_losses import evaluate
        from dagrl.telemetry.metrics import KL

        config = self.config.loss_fn
        if config.force_on_policy_ratio:
            batch = batch.with_columns(prev_logprobs=batch.logprobs.detach())
        costs, means = evaluate(self._token_loss, batch, f"loss_fn.name: {config.name}")
        corrected, ratios = self._importance(batch)
        if config.use_importance_sampling_correction:
            costs = costs * corrected
        divisor = config.sequence_length_divisor if self.average == "sums" else None
        terms = {"policy_loss": costs}
        if config.reference_policy_kl_penalty:
            terms[KL] = kl_penalty(batch)
            costs = costs + config.reference_policy_kl_penalty * terms[KL]
        if divisor is not None:
            costs, terms = costs / divisor, {name: value / divisor for name, value in terms.items()}
        return costs, {**means, **ratios, **terms}

    def _importance(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the importance weight of each token, and its metrics."""
        import torch

        from dagrl.rl.losses import importance_weights

        gap = torch.where(batch.mask > 0, batch.old_logprobs - batch.generation_logprobs, 0.0)
        ratio = torch.exp(gap)
        corrected = importance_weights(gap, batch)
        bounded = (corrected != ratio).to(ratio.dtype)
        return corrected, {"sampling_importance_ratio": ratio, "is_oob_ratio": bounded}

    @cached_property
    def _token_loss(self) -> TokenLossFunction:
        from dagrl.rl.token_losses import token_loss

        return token_loss(self.config.loss_fn)


class Ppo(Grpo):
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347, equation 7): GRPO's loss with advantages of each token, by
    generalized advantage estimation (`ppo.gamma`, `ppo.lam`)."""

    critic = True

    def advantages(self, rewards: Floats, valid: npt.NDArray[np.bool_]) -> npt.ArrayLike:
        """Returns the rewards: the critic is the baseline."""
        return rewards

    def token_advantages(self, rewards: Floats, values: Floats, mask: Floats) -> tuple[npt.ArrayLike, npt.ArrayLike]:
        """Returns generalized advantages, whitened over the batch, and returns."""
        from dagrl.rl.advantages import advantages_and_returns, whitened

        ppo = self.config.ppo
        advantages, returns = advantages_and_returns(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam)
        return whitened(advantages, mask), returns


class Values(Algorithm):
    """The loss of a critic, whose outputs are values of tokens in place of log-probabilities.

    Sources: equation 9 of PPO's paper; clipped values: OpenAI Baselines' PPO2, and verl's `compute_value_loss`.
    """

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


class Dpo(PreferenceAlgorithm):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7): minus the log-sigmoid of the
    margin of the answers' rewards, `beta` times the log-ratio to the reference policy."""

    columns = {"reference_logprobs": "reference_answer_sums"}

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss of each pair.

        Metrics: rewards of both answers, their margin, and how often the chosen one has the higher reward.
        """
        from torch.nn.functional import logsigmoid

        beta = self.config.preference.beta
        chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        likelihood = -pairs.chosen * len(pairs.chosen) / pairs.chosen_tokens.sum()  # its mean is that over tokens
        return -logsigmoid(chosen - rejected), {**compared(chosen, rejected), "preference/chosen_nll": likelihood}


class RewardModel(PreferenceAlgorithm):
    """A reward model by Bradley and Terry (1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1): minus the log-sigmoid of
    the difference of both scores."""

    scored = True

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss of each pair.

        Metrics: both scores, their difference, and how often the chosen answer has the higher one.
        """
        from torch.nn.functional import logsigmoid

        return -logsigmoid(pairs.chosen - pairs.rejected), compared(pairs.chosen, pairs.rejected)
