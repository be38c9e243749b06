"""The refit phase: train workers send their weights to generation workers, over a channel of their own."""

from __future__ import annotations

from dagrl.runtime.phase import Input, Shard, Value, join, phase


@phase
def refit(train: Shard, generation: Shard, version: Input) -> Value:
    """Sends every weight and commits it as one policy version."""
    sent = train.map("send_weights", version)
    received = generation.map("receive_weights", version)
    return join(sent, received)
