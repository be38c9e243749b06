"""Log-probability phases, of the policy and of the reference policy, for generated sequences."""

from __future__ import annotations

from dagrl.runtime.phase import Input, Shard, Value, join, phase
from dagrl.runtime.shapes import Field

INPUTS = {"tokens": Field("int64"), "lengths": Field("int64", "row")}

KEPT_INPUTS = {**INPUTS, "row_ids": Field("int64", "row")}


@phase(inputs=KEPT_INPUTS)
def logprobs(train: Shard, batch: Input) -> Value:
    """Computes log-probabilities and entropy under the current weights. They stay on the workers for `train_step`."""
    return join(train.map("keep_logprobs", batch, model="policy"))


@phase(inputs=KEPT_INPUTS)
def reference_logprobs(train: Shard, batch: Input) -> Value:
    """Computes log-probabilities under the reference policy's weights. They stay on the workers for `train_step`."""
    return join(train.map("keep_logprobs", batch, model="reference"))


@phase(inputs=INPUTS)
def logprob_rows(train: Shard, batch: Input) -> Value:
    """Returns log-probabilities and entropy under the current weights to the driver."""
    return train.reduce("merge_rows", train.map("logprobs", batch, model="policy"))
