"""The generation phase: one quantum of engine steps on every rank of a generation shard."""

from __future__ import annotations

from dagrl.runtime.phase import Input, Shard, Value, phase
from dagrl.runtime.shapes import Field

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
    """Adds requests, runs a bounded number of engine steps and returns what finished. Raises if the ranks differ."""
    finished = generation.map("generate", requests)
    return generation.reduce("merge_generated", finished)
