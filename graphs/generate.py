"""The generation phase: one quantum of engine steps on every rank of a generation shard."""

from __future__ import annotations

from dagrl.phase import Input, Shard, Value, phase
from dagrl.shapes import Field

INPUTS = {
    "tokens": Field("int64"),
    "lengths": Field("int64", "row"),
    "request_ids": Field("int64", "row"),
    "seeds": Field("int64", "row"),
    "max_new_tokens": Field("int64", "row"),
    "greedy": Field("int64", "row"),
}


@phase(inputs=INPUTS)
def generate(generation: Shard, requests: Input) -> Value:
    """Add requests, run a bounded number of engine steps, return what finished; equal on all ranks, or an error."""
    finished = generation.map("generate", requests)
    return generation.reduce("merge_generated", finished)
