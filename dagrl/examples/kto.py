"""KTO on pairs of answers, in one file: Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8. From its directory:

dagrl train dpo_own_data.yaml algorithm=kto:Kto loss_fn.args.undesirable_weight=1.5 data.path=pairs.jsonl
"""

import torch
from torch import Tensor

from dagrl import Pairs, PreferenceAlgorithm


class Kto(PreferenceAlgorithm):
    """How much better or worse than expected each answer is, with a weight for the bad ones.

    What is expected is the KL to the reference policy. As in TRL's `kto_pair`, the batch's rejected answers estimate it for
    the chosen ones, and the chosen for the rejected.
    """

    columns = {"reference_logprobs": "reference_answer_sums"}

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each pair, and what to record. All tensors are [pairs]."""
        beta, args = self.config.preference.beta, self.config.loss_fn.args
        chosen_kl, rejected_kl = (ratio.detach().mean().clamp(min=0) for ratio in (pairs.chosen_ratio, pairs.rejected_ratio))
        good = 1 - torch.sigmoid(beta * (pairs.chosen_ratio - rejected_kl))
        bad = 1 - torch.sigmoid(beta * (chosen_kl - pairs.rejected_ratio))
        loss = float(args.get("desirable_weight", 1.0)) * good + float(args.get("undesirable_weight", 1.0)) * bad
        return loss, {"own/good": good, "own/bad": bad, "own/kl": (chosen_kl + rejected_kl).expand(len(loss)) / 2}
