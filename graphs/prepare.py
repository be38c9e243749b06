"""Phases around log-probabilities: the optimizer's state leaves the GPUs and returns (`offload_optimizer_for_logprob`).

Neither waits for copies, so their own time is short; what is not hidden behind the phases that follow is waited for there.
"""

from __future__ import annotations

from dagrl.phase import Input, Shard, Value, join, phase


@phase
def logprob_inference_prep(train: Shard, step: Input) -> Value:
    """The optimizer's state starts to leave the GPUs."""
    return join(train.map("prepare_for_logprobs", step))


@phase
def training_prep(train: Shard, step: Input) -> Value:
    """The optimizer's state may come back, beside the next step's gradients."""
    return join(train.map("prepare_for_training", step))
