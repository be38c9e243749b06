"""KTO on single answers: Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8, in one file. From its directory:

dagrl train dpo_own_data.yaml algorithm=kto:Kto data.path=data/judged.jsonl loss_fn.args.undesirable_weight=1.5
"""

import torch
from torch import Tensor

from dagrl import Pairs, PreferenceAlgorithm


class Kto(PreferenceAlgorithm):
    """How much better or worse than expected each answer is, with a weight for either kind.

    What is expected is the KL to the reference policy. As in TRL's `KTOTrainer`, answers of other rows estimate it.
    """

    columns = {"reference_logprobs": "reference_answer_sums"}
    unpaired = True

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each answer, and what to record. Tensors are [rows]."""
        beta, args = self.config.preference.beta, self.config.loss_fn.args
        kl = pairs.rejected_ratio.detach().mean().clamp(min=0)
        gain = torch.where(pairs.desirable > 0, pairs.chosen_ratio - kl, kl - pairs.chosen_ratio)
        good, bad = float(args.get("desirable_weight", 1.0)), float(args.get("undesirable_weight", 1.0))
        loss = torch.where(pairs.desirable > 0, good, bad) * (1 - torch.sigmoid(beta * gain))
        return loss, {"own/gain": gain, "own/kl": kl.expand(len(loss))}
