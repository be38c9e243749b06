"""Training phases: an optimizer step, gradients for one, or the losses alone, over one data-parallel shard."""

from __future__ import annotations

from dagrl.phase import Input, Shard, Value, join, phase
from dagrl.shapes import Field

SFT_INPUTS = {"tokens": Field("int64"), "lengths": Field("int64", "row"), "loss_mask": Field("float32")}

GRPO_INPUTS = {
    **SFT_INPUTS,
    "advantages": Field("float32"),
    "generation_logprobs": Field("float32"),
    "prev_logprobs": Field("float32"),
    "reference_logprobs": Field("float32"),
}


@phase(inputs=SFT_INPUTS)
def sft_step(train: Shard, batch: Input) -> Value:
    """One optimizer step on demonstrations."""
    metrics = train.map("train_step", batch, loss="sft")
    return train.reduce("merge_metrics", metrics)


@phase(inputs=GRPO_INPUTS)
def train_step(train: Shard, batch: Input) -> Value:
    """One optimizer step of GRPO on generated sequences."""
    metrics = train.map("train_step", batch, loss="grpo")
    return train.reduce("merge_metrics", metrics)


@phase(inputs=GRPO_INPUTS)
def accumulate_gradients(train: Shard, batch: Input) -> Value:
    """Gradients of some of a GRPO step's sequences while others are generated; its `train_step` has the rest."""
    return join(train.map("accumulate_gradients", batch, loss="grpo"))


@phase(inputs=SFT_INPUTS)
def evaluate(train: Shard, batch: Input) -> Value:
    """The SFT loss of held-out demonstrations; nothing is trained."""
    metrics = train.map("evaluate", batch, loss="sft")
    return train.reduce("merge_metrics", metrics)
