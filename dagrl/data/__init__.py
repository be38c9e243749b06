"""Data: examples, the order in which a run draws them, and their tokens."""

from dagrl.data.examples import (
    Example as Example,
    Message as Message,
    Splits as Splits,
    load_splits as load_splits,
    read_examples as read_examples,
)
from dagrl.data.sampler import Sampler as Sampler, open_sampler as open_sampler
