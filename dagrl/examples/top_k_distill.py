"""Distillation from a teacher's likeliest tokens, several values a token, in one file. From its directory:

dagrl train grpo_quickstart.yaml algorithm=top_k_distill:TopK models.teacher.model_name=/models/teacher
"""

import torch
from torch import Tensor

from dagrl import Algorithm, Field, Input, Shard, TokenBatch, Value, phase

K = 8
NAMES = [(f"top_ids_{place}", f"top_logprobs_{place}") for place in range(K)]


@phase(inputs={"tokens": Field("int64"), "lengths": Field("int64", "row")})
def top_logprobs(teacher: Shard, batch: Input) -> Value:
    """The teacher's K likeliest tokens in place of each token, and their log-probabilities."""
    return teacher.reduce("merge_rows", teacher.map("top_logprobs", batch, count=K))


class TopK(Algorithm):
    """The forward KL from the teacher to the policy over the teacher's K likeliest tokens, whose sum is made 1."""

    columns = {name: f"{__name__}:top_logprobs" for pair in NAMES for name in pair}

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The cost of each token, and what to record. All tensors are [b, t], those of K tokens [b, t, K]."""
        ids, logprobs = (torch.stack([batch.column(name) for name in names], -1) for names in zip(*NAMES, strict=True))
        teacher = logprobs.log_softmax(-1)
        policy = batch.logprobs_of(ids).log_softmax(-1)
        cost = (teacher.exp() * (teacher - policy)).sum(-1)
        return cost, {"own/forward_kl": cost, "own/covered": logprobs.exp().sum(-1)}
