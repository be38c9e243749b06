"""Preferences: pairs of answers to a prompt, of which one was chosen, and the losses that compare them.

    class Ipo(PreferenceAlgorithm):
        columns = {"reference_logprobs": "reference_answer_sums"}

        def pair_loss(self, pairs):  # tensors [pairs]
            gap = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
            return (gap - 1 / (2 * self.config.preference.beta)) ** 2, {}

Such a loss depends on the model only through one number per answer: the sum of its tokens' log-probabilities, or the score
of a reward model. So a step computes these sums s first. The gradient of the loss is then the sum over answers of dL/ds
times the gradient of s: one optimizer step in which every token of an answer has the weight dL/ds. The answers of a pair
need not be in one microbatch, or on one worker, and the result is exact in every layout. It costs one forward pass more
than a loss that sees both answers at once.

Single answers with labels are learned in the same way (`unpaired`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from dagrl.errors import ConfigError
from dagrl.imports import running
from dagrl.rl.algorithm import KEY, Algorithm
from dagrl.telemetry.metrics import ACCURACY

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.rl.token_losses import TokenBatch, TokenResult

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pairs:
    """Both answers of each pair: tensors [pairs], float64. Only `chosen` and `rejected` have a gradient.

    `chosen` and `rejected` are sums over the answer's tokens of log-probabilities, or scores of a reward model.
    `reference_*` are sums under the reference policy, `*_tokens` the numbers of tokens. Of an algorithm that is `unpaired`,
    `chosen` is the answer of a row, `desirable` its label (1 or 0), and `rejected` the answer of another row to its prompt.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None
    desirable: Tensor | None = None

    @property
    def chosen_ratio(self) -> Tensor:
        """The log-probability of the chosen answer minus that under the reference policy."""
        return self.chosen - _known(self.reference_chosen)

    @property
    def rejected_ratio(self) -> Tensor:
        """The log-probability of the rejected answer minus that under the reference policy."""
        return self.rejected - _known(self.reference_rejected)


class PreferenceAlgorithm(Algorithm):
    """Learns from pairs of answers by `pair_loss`."""

    learns_from = "preferences"
    columns: Mapping[str, str] = {}
    average = "sums"
    scored: ClassVar[bool] = False
    """Whether `pairs.chosen` and `pairs.rejected` are scores of a model with a scalar head, read after the last token."""
    unpaired: ClassVar[bool] = False
    """Whether rows have one answer (`data.response_key`) and a label (`data.label_key`); see `Pairs`."""

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss of each pair [pairs], and further values [pairs] whose means become metrics."""
        raise NotImplementedError

    def loss(self, batch: TokenBatch) -> TokenResult:
        """Returns the model's output for each token times the weight of its answer, which has the gradient of the loss."""
        return batch.column("answer_weights") * batch.logprobs


def compared(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Returns metrics of the rewards of both answers [pairs]."""
    return {
        "preference/chosen_reward": chosen,
        "preference/rejected_reward": rejected,
        "preference/margin": chosen - rejected,
        ACCURACY: (chosen > rejected).to(chosen.dtype),
    }


def _known(sums: Tensor | None) -> Tensor:
    if sums is None:
        raise ConfigError(
            f"{KEY}: the loss of a pair reads sums under the reference policy; name 'reference_logprobs' in the algorithm's "
            "`columns`"
        )
    return sums


@dataclass(frozen=True)
class PairLosses:
    """The loss of a batch of pairs: the weight of each answer [rows] (its gradient), and metrics."""

    weights: Sums
    metrics: Mapping[str, float]


def gives_scores(algorithm: Algorithm) -> bool:
    """Whether the algorithm trains a reward model."""
    return isinstance(algorithm, PreferenceAlgorithm) and algorithm.scored


def is_unpaired(algorithm: Algorithm) -> bool:
    """Whether the algorithm learns from single answers with labels."""
    return isinstance(algorithm, PreferenceAlgorithm) and algorithm.unpaired


def sum_phases(algorithm: Algorithm) -> tuple[str, ...]:
    """Returns the phases that compute the sums of answers: under the policy, and the reference policy if it is compared.

    Raises ConfigError for other columns.
    """
    unknown = [name for name in algorithm.columns if name != "reference_logprobs"]
    if unknown:
        raise ConfigError(
            f"{KEY}: {algorithm.config.algorithm} has the column {unknown[0]!r}; expected, as it compares pairs: "
            "'reference_logprobs' alone"
        )
    return ("answer_sums", *algorithm.columns.values())


def pair_losses(
    algorithm: PreferenceAlgorithm,
    sums: Sums,
    tokens: npt.NDArray[np.int64],
    reference: Sums | None,
    labels: Sums | None = None,
) -> PairLosses:
    """Computes the mean loss over pairs, from the sums, numbers of tokens and reference sums of their answers [rows].

    `labels` [pairs] are 1 where the first answer is desirable, for an algorithm that is `unpaired`.

    Rows 2i and 2i + 1 are the chosen and the rejected answer of pair i. Raises ConfigError if the algorithm's loss fails,
    has another shape, or is not finite for finite sums. The weights of sums that are not finite are neither, so the
    optimizer skips the step.
    """
    import torch

    from dagrl.rl.token_losses import check_shapes

    name = algorithm.config.algorithm
    leaf = torch.tensor(sums, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor(tokens, dtype=torch.float64)
    fixed = (None, None) if reference is None else tuple(torch.tensor(reference, dtype=torch.float64).view(-1, 2).T)
    desirable = None if labels is None else torch.tensor(labels, dtype=torch.float64)
    with running(name, KEY):
        pairs = Pairs(*leaf.view(-1, 2).T, *counts.view(-1, 2).T, *fixed)
        losses, means = algorithm.pair_loss(replace(pairs, desirable=desirable))
        check_shapes(f"{KEY}: {name}", losses, means, [len(sums) // 2], "a value for each pair")
        if not losses.requires_grad:
            raise ConfigError(f"{KEY}: {name} does not depend on `pairs.chosen` or `pairs.rejected`, so nothing would train")
        (gradient,) = torch.autograd.grad(losses.mean(), leaf)
    if np.isfinite(sums).all() and not (losses.isfinite().all() and gradient.isfinite().all()):
        raise ConfigError(f"{KEY}: {name} gives a loss or gradients that are not finite for the sums {sums.tolist()}")
    metrics = {"loss": losses, **means}
    return PairLosses(gradient.numpy(), {key: float(value.detach().mean()) for key, value in metrics.items()})
