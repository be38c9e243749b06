"""Training phases over one data-parallel shard: an optimizer step, or the losses alone."""

from __future__ import annotations

from dagrl.runtime.phase import Input, Shard, Value, phase
from dagrl.runtime.shapes import Field

ROWS = {"tokens": Field("int64"), "lengths": Field("int64", "row"), "loss_mask": Field("float32")}

SAMPLES = {
    **ROWS,
    "advantages": Field("float32"),
    "generation_logprobs": Field("float32"),
    "row_ids": Field("int64", "row"),  # key the log-probabilities kept on the workers
}


@phase(inputs=ROWS)
def demonstration_step(train: Shard, batch: Input) -> Value:
    """Takes one optimizer step on demonstrations."""
    metrics = train.map("train_step", batch, loss="likelihood")
    return train.reduce("merge_metrics", metrics)


@phase(inputs=SAMPLES)
def train_step(train: Shard, batch: Input) -> Value:
    """Takes one optimizer step on generated sequences, by the run's algorithm."""
    metrics = train.map("train_step", batch, loss="policy")
    return train.reduce("merge_metrics", metrics)


@phase(inputs=ROWS)
def evaluate(train: Shard, batch: Input) -> Value:
    """Computes the loss of held-out demonstrations, without training."""
    metrics = train.map("evaluate", batch, loss="likelihood")
    return train.reduce("merge_metrics", metrics)
