"""Data: what a run learns from, the order it is drawn in, and its tokens."""

from dagrl.data.examples import Example, Message, Splits, load_splits, read_examples, read_jsonl
from dagrl.data.sampler import Sampler

__all__ = ["Example", "Message", "Sampler", "Splits", "load_splits", "read_examples", "read_jsonl"]
