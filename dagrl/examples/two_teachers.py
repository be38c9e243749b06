"""Distillation from two teachers, in one file: columns by phases of your own. From its directory:

dagrl train grpo_quickstart.yaml algorithm=two_teachers:TwoTeachers models.first.model_name=A models.second.model_name=B
"""

import math

import torch
from torch import Tensor

from dagrl import Algorithm, Field, Input, Shard, TokenBatch, Value, phase

INPUTS = {"tokens": Field("int64"), "lengths": Field("int64", "row")}


@phase(inputs=INPUTS)
def first_logprobs(first: Shard, batch: Input) -> Value:  # the Shard's name is a key of `models`
    return first.reduce("merge_rows", first.map("logprobs", batch, column="first"))


@phase(inputs=INPUTS)
def second_logprobs(second: Shard, batch: Input) -> Value:
    return second.reduce("merge_rows", second.map("logprobs", batch, column="second"))


class TwoTeachers(Algorithm):
    """The reverse KL of the policy to the mean of both teachers' distributions, at the tokens that the policy sampled."""

    columns = {"prev_logprobs": "logprobs", "first": f"{__name__}:first_logprobs", "second": f"{__name__}:second_logprobs"}

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The cost of each token, and what to record. All tensors are [b, t]."""
        mean = torch.logaddexp(batch.column("first"), batch.column("second")) - math.log(2)
        gap = batch.old_logprobs - mean
        return torch.exp(batch.log_ratio) * gap, {"own/reverse_kl": gap}
