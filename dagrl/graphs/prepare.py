"""Phases around log-probabilities that move the optimizer's state off the GPUs and back (`offload_optimizer_for_logprob`).

Neither waits for its copies; the next phase that needs the state does.
"""

from __future__ import annotations

from dagrl.runtime.phase import Input, Shard, Value, join, phase


@phase
def logprob_inference_prep(train: Shard, step: Input) -> Value:
    """Starts moving the optimizer's state off the GPUs."""
    return join(train.map("prepare_for_logprobs", step))


@phase
def training_prep(train: Shard, step: Input) -> Value:
    """Schedules the optimizer's state to return while the next step computes gradients."""
    return join(train.map("prepare_for_training", step))
