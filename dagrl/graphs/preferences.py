"""Phases that learn from pairs of answers: log-probabilities of whole answers, and an optimizer step on them."""

from __future__ import annotations

from dagrl.graphs.train import ROWS
from dagrl.runtime.phase import Input, Shard, Value, phase
from dagrl.runtime.shapes import Field

WEIGHTED = {**ROWS, "answer_weights": Field("float32", "row")}


@phase(inputs=ROWS)
def answer_sums(train: Shard, batch: Input) -> Value:
    """Returns to the driver the sum over each answer's tokens of their log-probabilities under the current weights."""
    return train.reduce("merge_rows", train.map("answer_sums", batch, model="policy"))


@phase(inputs=ROWS)
def reference_answer_sums(train: Shard, batch: Input) -> Value:
    """Returns the same sums under the reference policy's weights."""
    return train.reduce("merge_rows", train.map("answer_sums", batch, model="reference"))


@phase(inputs=WEIGHTED)
def preference_step(train: Shard, batch: Input) -> Value:
    """Takes one optimizer step on answers, each with a weight."""
    metrics = train.map("train_step", batch, loss="policy")
    return train.reduce("merge_metrics", metrics)
