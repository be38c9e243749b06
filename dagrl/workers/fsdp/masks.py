"""Masks of packed rows whose sequences share prefixes, for attention that takes masks. Imported only where torch is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from transformers import masking_utils

from dagrl.workers.train.microbatches import Segments, upload


@contextmanager
def shared_masks(implementation: str, segments: Segments, positions: Tensor) -> Iterator[None]:
    """Context in which transformers makes the masks of a packed row with these `positions` [1, s].

    Its functions say which key a query sees, by their indices in a row. Here they are asked for positions in the sequence,
    and a query sees none but the keys of its own sequence and of its prefix.
    """
    plain = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    find_sequences: Callable[..., Any] = masking_utils.find_packed_sequence_indices
    numbers = np.arange(len(segments.heads))
    columns = [np.repeat(column, segments.query_lengths) for column in (numbers, np.array(segments.heads))]
    sequences, prefixes = upload(columns, positions.device)
    places = positions.flatten()

    def make(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            number = sequences[key]
            inside: Tensor = mask_function(row, head, places[query], places[key])
            return inside & ((number == sequences[query]) | (number == prefixes[query]))

        if "allow_is_bidirectional_skip" in kwargs:  # of another part of the model, such as a vision tower
            return plain(*args, mask_function=mask_function, **kwargs)
        return plain(*args, mask_function=seen, **{**kwargs, "allow_is_causal_skip": False})

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation] = make
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        del masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
        masking_utils.find_packed_sequence_indices = find_sequences
