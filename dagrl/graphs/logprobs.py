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
def teacher_logprobs(teacher: Shard, batch: Input) -> Value:
    """Returns log-probabilities under the teacher, on workers of its own, to the driver."""
    return teacher.reduce("merge_rows", teacher.map("logprobs", batch))


@phase(inputs={"lengths": Field("int64", "row"), "row_ids": Field("int64", "row"), "reference_logprobs": Field("float32")})
def keep_reference_logprobs(train: Shard, batch: Input) -> Value:
    """Stores log-probabilities that another group computed under the reference policy, for `train_step`."""
    return join(train.map("keep_columns", batch))
