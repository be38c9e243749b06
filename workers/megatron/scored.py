"""Which tokens of a microbatch the output layer computes: those in the loss mask, and neither prompts nor padding.

The output layer is a quarter of the arithmetic of a model with 0.6 B parameters, and a loss reads nothing outside its mask.
The host counts the tokens, so the device finds them without a wait. Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dagrl.runtime.shapes import Array, Batch
from dagrl.workers.megatron.logprobs import OutputLayer, token_logprobs


def scored_tokens(masks: Sequence[Tensor], rows: Sequence[Collection[int]], batch: Batch) -> list[Tensor]:
    """Returns the scored tokens of each microbatch of `batch`, given its loss mask and its rows; row -1 is padding."""
    per_row = scored_per_row(batch["loss_mask"], batch["lengths"])
    counts = [sum(int(per_row[row]) for row in held if row >= 0) for held in rows]
    return [indices(mask.flatten() != 0, count) for mask, count in zip(masks, counts, strict=True)]


def scored_per_row(mask: Array, lengths: Array) -> npt.NDArray[np.int64]:
    """Returns how many tokens of each row of `mask` [rows, width] are in it. The first token is never predicted."""
    inside = np.arange(1, mask.shape[1]) < lengths[:, None]
    counts: npt.NDArray[np.int64] = ((mask[:, 1:] != 0) & inside).sum(1)
    return counts


def indices(selected: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` true entries of `selected` [n], in order; index 0 if there is none.

    `torch.nonzero` would wait for the device to know the count.
    """
    found = torch.zeros(max(count, 1) + 1, dtype=torch.int64, device=selected.device)
    places = torch.where(selected, selected.cumsum(0) - 1, len(found) - 1)
    return found.scatter_(0, places, torch.arange(len(selected), device=selected.device))[:-1]


def scored_logprobs(hidden: Tensor, labels: Tensor, scored: Tensor | None, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Returns `token_logprobs` of `hidden` [b, s, hidden size] and `labels` [b, s], computed at `scored` and 0 elsewhere."""
    if scored is None:
        return token_logprobs(hidden, labels, layer)
    found = token_logprobs(hidden.flatten(0, 1).index_select(0, scored), labels.flatten().index_select(0, scored), layer)
    logprobs, entropy = (_spread(column, scored, labels) for column in found)
    return logprobs, entropy


def masked_columns(data: Mapping[str, Tensor], scored: Tensor | None) -> dict[str, Tensor]:
    """Returns `data` with 0 outside the loss mask, in columns of numbers: ratios to the missing log-probabilities stay 1."""
    if scored is None:
        return dict(data)
    inside = data["loss_mask"] != 0
    return {name: torch.where(inside, one, 0.0) if one.is_floating_point() else one for name, one in data.items()}


def _spread(values: Tensor, scored: Tensor, like: Tensor) -> Tensor:
    return values.new_zeros(like.numel()).index_copy(0, scored, values).view(like.shape)
