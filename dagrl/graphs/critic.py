"""Phases of a critic: values of generated sequences, and an optimizer step on them."""

from __future__ import annotations

from dagrl.graphs.logprobs import INPUTS
from dagrl.graphs.train import ROWS
from dagrl.runtime.phase import Input, Shard, Value, phase
from dagrl.runtime.shapes import Field

CRITIC_INPUTS = {**ROWS, "values": Field("float32"), "returns": Field("float32")}


@phase(inputs=INPUTS)
def critic_values(critic: Shard, batch: Input) -> Value:
    """Returns the value of the state before each token to the driver."""
    return critic.reduce("merge_rows", critic.map("values", batch))


@phase(inputs=CRITIC_INPUTS)
def critic_step(critic: Shard, batch: Input) -> Value:
    """Takes one optimizer step of the critic towards `returns`; `values` are those before the step."""
    return critic.reduce("merge_metrics", critic.map("train_step", batch, loss="value"))
