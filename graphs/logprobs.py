"""Log-probability phases: of the policy, and of the reference policy, for sequences that were generated."""

from __future__ import annotations

from dagrl.phase import Input, Shard, Value, phase
from dagrl.shapes import Field

INPUTS = {"tokens": Field("int64"), "lengths": Field("int64", "row")}


@phase(inputs=INPUTS)
def logprobs(train: Shard, batch: Input) -> Value:
    """Log-probability and entropy of every token under the current weights."""
    rows = train.map("logprobs", batch, model="policy")
    return train.reduce("merge_rows", rows)


@phase(inputs=INPUTS)
def reference_logprobs(train: Shard, batch: Input) -> Value:
    """The same under the reference policy's weights."""
    rows = train.map("logprobs", batch, model="reference")
    return train.reduce("merge_rows", rows)
