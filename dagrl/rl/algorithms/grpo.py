"""GRPO and its relatives: a token loss of choice, importance weights, and a KL penalty, as the keys of `loss_fn` say.

Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, equations 3 and 4. `dagrl.rl.token_losses`, `dagrl.rl.advantages`
and `dagrl.rl.losses` have the formulas of the parts and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from dagrl.config.roles import TEACHER
from dagrl.rl.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.rl.token_losses import TokenBatch, TokenLossFunction, TokenResult


class Grpo(Algorithm):
    """The token loss `loss_fn.name`, weighted, plus `reference_policy_kl_penalty` times the KL to the reference policy.

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
