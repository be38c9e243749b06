"""Direct preference optimization.

Source: Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290, equation 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagrl.rl.preferences import Pairs, PreferenceAlgorithm, compared

if TYPE_CHECKING:
    from torch import Tensor


class Dpo(PreferenceAlgorithm):
    """Minus the log-sigmoid of the margin of the answers' rewards, `beta` times the log-ratio to the reference policy."""

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
