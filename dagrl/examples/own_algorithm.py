"""An algorithm of your own, in one file. From its directory:

dagrl train grpo_quickstart.yaml algorithm=own_algorithm:KlInReward
"""

import numpy as np
import torch
from torch import Tensor

from dagrl import Algorithm, TokenBatch

WEIGHT = 0.05


class KlInReward(Algorithm):
    """A policy gradient whose rewards, not whose loss, contain the distance from the reference policy."""

    columns = {"prev_logprobs": "logprobs", "reference_logprobs": "reference_logprobs"}  # each by a phase, before a step
    average = "sequences"  # over each sequence's tokens, then over sequences

    def advantages(self, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Rewards minus their prompt's mean. Both arrays are [prompts, completions]."""
        return rewards - (rewards * valid).sum(axis=1, keepdims=True) / valid.sum(axis=1, keepdims=True).clip(min=1)

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The cost of each token, and what to record. All tensors are [b, t]."""
        distance = batch.old_logprobs - batch.reference_logprobs
        ratio = torch.exp(batch.log_ratio)
        return -(batch.advantages - WEIGHT * distance) * ratio, {"own/distance": distance}
