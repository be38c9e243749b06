"""The calibration phase: scales of generation's KV cache in FP8, from the largest keys and values of a batch."""

from __future__ import annotations

from dagrl.phase import Input, Shard, Value, phase
from graphs.logprobs import INPUTS


@phase(inputs=INPUTS)
def calibrate_kv_scales(train: Shard, batch: Input) -> Value:
    """Set the scales that the next refit carries, under the current weights; the largest of them."""
    return train.reduce("merge_kv_scales", train.map("calibrate_kv_scales", batch))
