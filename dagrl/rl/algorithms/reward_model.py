"""A reward model: one score for each answer, by the Bradley-Terry model of preferences.

Sources: Bradley and Terry 1952, "Rank Analysis of Incomplete Block Designs"; Ouyang et al. 2022, arXiv:2203.02155, equation
1; the term that centers scores: Eisenstein et al. 2023, "Helping or Herding?", arXiv:2312.09244, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagrl.rl.preferences import Pairs, PreferenceAlgorithm, compared

if TYPE_CHECKING:
    from torch import Tensor


class RewardModel(PreferenceAlgorithm):
    """Minus the log-sigmoid of the difference of both scores."""

    scored = True

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss of each pair.

        Metrics: both scores, their difference, and how often the chosen answer has the higher one.
        """
        from torch.nn.functional import logsigmoid

        loss = -logsigmoid(pairs.chosen - pairs.rejected)
        weight = self.config.preference.center_rewards_coefficient
        if weight:
            loss = loss + weight * (pairs.chosen + pairs.rejected) ** 2
        return loss, compared(pairs.chosen, pairs.rejected)
