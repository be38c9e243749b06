"""Data: examples, the order in which a run draws them, and their tokens."""

from dagrl.data.examples import Example, Message, Splits, load_splits, read_jsonl
from dagrl.data.sampler import MixtureSampler, Sampler, open_sampler

__all__ = [
    "Example",
    "Message",
    "MixtureSampler",
    "Sampler",
    "Splits",
    "load_splits",
    "open_sampler",
    "read_jsonl",
]
