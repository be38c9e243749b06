"""The refit phase: the train weights go to the generation workers, over their own channel, by the plan made at the start."""

from __future__ import annotations

from dagrl.phase import Input, Shard, Value, join, phase


@phase
def refit(train: Shard, generation: Shard, version: Input) -> Value:
    """Send and receive every weight as one policy version."""
    sent = train.map("send_weights", version)
    received = generation.map("receive_weights", version)
    return join(sent, received)
