"""Upload: arrays that a step begins with, brought to the device at once. Imported only where torch is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; of the widest elements


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies of the arrays on the device, side by side in one piece of memory.

    To a GPU they go in one copy from pinned memory: nothing waits for it, and what follows on the current stream finds them
    there. A copy for each, from other memory, would be waited for each time while the device has nothing to do.
    """
    starts = list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
    host = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        np.copyto(memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_torch_type(array)).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _torch_type(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
