"""Upload: arrays that a step begins with, brought to the device at once. Imported only where torch is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; of the widest elements


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies of the arrays on the device, side by side in one piece of memory.

    To a GPU they go in one copy from pinned memory: nothing waits for it, and what follows on the current stream finds them
    there. A copy for each, from other memory, would be waited for each time while the device has nothing to do.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    starts = list(accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0))
    host = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, place in zip(tensors, _laid_out(host, tensors, starts), strict=True):
        place.copy_(tensor)
    return _laid_out(host.to(device, non_blocking=True), tensors, starts)


def _laid_out(memory: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Tensors of those types and shapes in `memory` [bytes], each at its start."""
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(like, starts, strict=True)
    ]
