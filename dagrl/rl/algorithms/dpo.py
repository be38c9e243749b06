"""Direct preference optimization.

Sources: Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290, equation 7; label smoothing: Mitchell
2023, "A note on DPO with noisy preferences", https://ericmitchell.ai/cdpo.pdf, equation 3; the likelihood of the chosen
answers: Pang et al. 2024, "Iterative Reasoning Preference Optimization", arXiv:2404.19733, equation 1, averaged over tokens
as in TRL.
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

        config = self.config.preference
        chosen, rejected = config.beta * pairs.chosen_ratio, config.beta * pairs.rejected_ratio
        margin = chosen - rejected
        loss = -(1 - config.label_smoothing) * logsigmoid(margin) - config.label_smoothing * logsigmoid(-margin)
        likelihood = -pairs.chosen * len(pairs.chosen) / pairs.chosen_tokens.sum()  # its mean is that over tokens
        if config.sft_loss_weight:
            loss = loss + config.sft_loss_weight * likelihood
        return loss, {**compared(chosen, rejected), "preference/chosen_nll": likelihood}
