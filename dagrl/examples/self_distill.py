"""A policy that stays near an older version of itself, in one file. From its directory:

dagrl train grpo_quickstart.yaml algorithm=self_distill:NearItself loss_fn.args.weight=0.1
"""

import torch
from torch import Tensor

from dagrl import Algorithm, Field, Input, Shard, TokenBatch, Value, join, phase

EVERY = 10
INPUTS = {"tokens": Field("int64"), "lengths": Field("int64", "row"), "row_ids": Field("int64", "row")}


@phase(inputs=INPUTS)
def older_logprobs(train: Shard, batch: Input) -> Value:
    """Log-probabilities under the weights of up to EVERY steps ago, which stay on the train workers."""
    return join(train.map("keep_logprobs", batch, model="reference", renew_every=EVERY))


class NearItself(Algorithm):
    """The policy gradient, and the forward KL from the older version by importance sampling at the sampled tokens."""

    columns = {"prev_logprobs": "logprobs", "reference_logprobs": f"{__name__}:older_logprobs"}

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The cost of each token, and what to record. All tensors are [b, t]."""
        weight = float(self.config.loss_fn.args.get("weight", 0.1))
        older = torch.exp((batch.reference_logprobs - batch.old_logprobs).clamp(-5, 5))  # of the older version, per sample
        distance = older * (batch.reference_logprobs - batch.logprobs)
        return -batch.advantages * torch.exp(batch.log_ratio) + weight * distance, {"own/distance": distance}
