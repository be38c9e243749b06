"""The calibration phase: scales of generation's FP8 KV cache, from the largest keys and values of a batch."""

from __future__ import annotations

from dagrl.graphs.logprobs import INPUTS
from dagrl.runtime.phase import Input, Shard, Value, phase


@phase(inputs=INPUTS)
def calibrate_kv_scales(train: Shard, batch: Input) -> Value:
    """Sets the scales that the next refit sends, under the current weights. Returns the largest of them."""
    return train.reduce("merge_kv_scales", train.map("calibrate_kv_scales", batch))
