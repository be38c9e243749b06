"""The loss of a microbatch: an algorithm's costs of its tokens, masked and averaged over the global batch.

A loss is computed for one microbatch, or one worker's slice of its tokens, and divides by the counts of the *whole* global
batch (`Denominators`). Gradients add up over microbatches, context-parallel slices and shards, so the result does not
depend on how the batch is split.

All tensors are token aligned (see `dagrl.runtime.shapes`): entry `t` of `logprobs` is the log-probability of token `t` given
the tokens before it. The module needs only torch. Workers use it like this:

    output = batch_loss(algorithm, logprobs, data, Denominators(tokens, sequences))
    output.loss.backward()                      # gradients are summed over microbatches, cp and dp, never averaged
    StepMetrics(sums={name: float(value) for name, value in output.sums.items()}, maxima=...)

Sources of the formulas, cited below by their short names:
  DeepSeekMath Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, equations 3 and 4 (GRPO, and its KL term in the loss)
  DAPO         Yu et al. 2025, "DAPO", arXiv:2503.14476, equations 8 to 12 (token-level loss)
  Dr.GRPO      Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783 (constant divisor of sequences)
  KL           Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (k1, k2, k3)
  TIS          Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
               https://fengyao.notion.site/off-policy-rl; truncation itself: Ionides 2008, "Truncated Importance Sampling"
  IcePop       Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning ..." (Ring-1T), arXiv:2510.18855
  MIS          Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
               Mismatch" (masking whole sequences); by the geometric mean of their ratios as NeMo-RL's `seq-mask-tis`
  metrics      NeMo-RL, docs/guides/grpo.md#metrics (`token_mult_prob_error`, `probs_ratio`, `sampling_importance_ratio`)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dagrl.errors import DataError
from dagrl.rl.algorithm import Algorithm
from dagrl.rl.token_losses import Sequences, TokenBatch, evaluate
from dagrl.telemetry.metrics import KL


@dataclass(frozen=True)
class Denominators:
    """Counts over the global batch, all shards together.

    `tokens` is the sum of `loss_mask`, `sequences` the number of rows with at least one token in it. Raises DataError if
    either is 0: division by 0 would turn every weight into NaN.
    """

    tokens: float
    sequences: float

    def __post_init__(self) -> None:
        if not (self.tokens > 0 and self.sequences > 0):
            raise DataError(
                f"the global batch has {self.tokens:g} tokens in the loss, in {self.sequences:g} sequences; expected: at "
                "least one. Check how loss_mask is made, and whether policy.max_total_sequence_length cuts off responses"
            )


LOSS_TERMS = frozenset({"loss", "policy_loss", KL})
"""Sums that are divided like the loss. The others are means over tokens, or counts."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of one microbatch: `loss` with its autograd graph, and detached 0-d tensors.

    `sums` add up over microbatches, context-parallel slices and shards; of `maxima` the largest counts.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


def batch_loss(
    algorithm: Algorithm,
    logprobs: Tensor,
    data: Mapping[str, Tensor],
    denominators: Denominators,
    sequences: Sequences | None = None,
    lookup: Callable[[Tensor], Tensor] | None = None,
) -> LossOutput:
    """Returns `algorithm.loss` of the tokens in `loss_mask`, averaged over the global batch by `algorithm.average`.

    `logprobs` [b, t]; `data`: `loss_mask`, the fields of the batch and the algorithm's columns [b, t]. Without `sequences`
    every row is one. `lookup`: see `TokenBatch`.

    Sums: `loss`, `valid_tokens`, and the means of the further values that `loss` returns. For generated samples also
    `token_mult_prob_error` and `gen_kl_error` (see `logprob_difference`). Maxima, for these: `max_logprob_difference`,
    `max_probs_ratio`.
    """
    mask = data["loss_mask"].to(logprobs.dtype)
    batch = TokenBatch(logprobs, mask, data, algorithm.config.loss_fn, sequences, lookup)
    costs, means = evaluate(algorithm.loss, batch, algorithm.config.algorithm)
    weights = _token_weights(batch, algorithm, denominators)
    loss, each = _masked_sum(costs, weights), mask / denominators.tokens
    sums = {name: _masked_sum(value.detach(), weights if name in LOSS_TERMS else each) for name, value in means.items()}
    sums |= {"loss": loss.detach(), "valid_tokens": mask.sum()}
    if "generation_logprobs" not in data:
        return LossOutput(loss, sums)
    before = data["prev_logprobs"] if "prev_logprobs" in algorithm.columns else logprobs.detach()
    known = batch.with_columns(prev_logprobs=before)
    agreement, maxima = logprob_difference(known.columns, mask, denominators)
    ratio = torch.exp(known.log_ratio.detach()) * (mask > 0)
    return LossOutput(loss, {**sums, **agreement}, {**maxima, "max_probs_ratio": ratio.amax()})


def importance_weights(gap: Tensor, batch: TokenBatch) -> Tensor:
    """Bounds the importance ratio w of each token [b, t], the exponential of `gap`: prev - generation log-probability.

    With the bounds C = `truncated_importance_sampling_ratio` and c = `truncated_importance_sampling_ratio_min`:
    `tis` min(w, C) (TIS); `icepop` w where c <= w <= C, else 0 (IcePop); `seq-mask-tis` w in sequences whose geometric mean
    of w is in [c, C], else 0 for all their tokens (MIS). Without C, w itself. The denominators always count all tokens.
    """
    importance, config = gap.exp(), batch.config
    high, low = config.truncated_importance_sampling_ratio, config.truncated_importance_sampling_ratio_min
    if high is None:
        return importance
    if config.truncated_importance_sampling_type == "tis":
        return importance.clamp(max=high)
    ratio = importance if config.truncated_importance_sampling_type == "icepop" else batch.sequence_mean(gap).exp()
    inside = (ratio <= high) & (ratio >= (low or 0.0))
    return torch.where(inside, importance, 0.0)


def logprob_difference(
    data: Mapping[str, Tensor], mask: Tensor, denominators: Denominators
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compares generation's log-probabilities with the train workers': `generation_logprobs` and `prev_logprobs` [b, t].

    `token_mult_prob_error` is NeMo-RL's: the mean over tokens of exp(|generation - prev|); 1 if both agree. After a
    correct refit it differs from 1 only by rounding. `gen_kl_error` (NeMo-RL's too) is KL(generation || train), estimated
    by k3 on generation's own samples. `max_logprob_difference` is the largest |generation - prev|. Returns sums and maxima
    of a `LossOutput`.
    """
    difference = torch.where(mask > 0, data["generation_logprobs"] - data["prev_logprobs"], 0.0)
    gap = difference.abs()
    divergence = kl_estimate(difference, torch.zeros_like(difference), "k3")
    sums = {"token_mult_prob_error": torch.exp(gap), "gen_kl_error": divergence}
    means = {name: _masked_sum(value, mask) / denominators.tokens for name, value in sums.items()}
    return means, {"max_logprob_difference": gap.amax()}


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates KL(policy || reference) per token from samples of the policy; any shape (KL).

    With d = logprob - reference: k1 = d (unbiased, either sign), k2 = d^2 / 2 (biased, never negative), k3 = exp(-d) - 1 + d
    (unbiased, never negative; DeepSeekMath's equation 4). On samples of the policy itself, the
    gradient of k1 has mean zero: use it as a metric rather than as a penalty.
    """
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def kl_penalty(batch: TokenBatch) -> Tensor:
    """Estimates the KL to the reference policy for each token [b, t], clamped as `loss_fn.kl_*_clamp_value` say."""
    config = batch.config
    gap = torch.where(batch.mask > 0, batch.logprobs - batch.reference_logprobs, 0.0)
    if config.kl_input_clamp_value is not None:
        gap = gap.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
    estimate = kl_estimate(gap, torch.zeros_like(gap), config.reference_policy_kl_type)
    if config.kl_output_clamp_value is not None:
        estimate = estimate.clamp(-config.kl_output_clamp_value, config.kl_output_clamp_value)
    return estimate


def _token_weights(batch: TokenBatch, algorithm: Algorithm, denominators: Denominators) -> Tensor:
    """Returns the weight of each token in the loss [b, t] (see `Algorithm.average`)."""
    mask = batch.mask
    if algorithm.average == "tokens":
        return mask / denominators.tokens
    if algorithm.average == "sums":
        return mask / denominators.sequences
    return mask / batch.sequence_tokens / denominators.sequences


def _masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sums what has a weight. Padding can neither overflow nor poison a gradient."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()
