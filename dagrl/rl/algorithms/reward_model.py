"""A reward model: one score for each answer, by the Bradley-Terry model of preferences.

Sources: Bradley and Terry 1952, "Rank Analysis of Incomplete Block Designs"; Ouyang et al. 2022, arXiv:2203.02155, equation
1.
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

        return -logsigmoid(pairs.chosen - pairs.rejected), compared(pairs.chosen, pairs.rejected)
