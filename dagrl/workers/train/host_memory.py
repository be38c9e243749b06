"""Pinned host memory: one-copy uploads of a step's arrays, and staging buffers for offloaded state and checkpoints.

Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20  # a power of two, to which torch's pinned allocator rounds up
ALIGNMENT = 16  # bytes, of the widest element type


class StagingBuffers:
    """Copies of train state in host memory, from which a checkpoint is written while training continues.

    Copies from a GPU use pinned memory and run at link speed; training stops only for that time. Torch caches the pinned
    memory of a process, so only the first save allocates. It rounds allocations up to powers of two, so copies share
    buckets of such sizes. Dropping this object frees the memory.
    """

    def __init__(self) -> None:
        self._buckets: list[Tensor] = []  # [bytes] each
        self._filled: list[int] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """Copies a tensor to host memory. A copy from a GPU is complete when the current stream reaches it."""
        return tensor.clone() if tensor.is_cpu else self.room_for(tensor).copy_(tensor, non_blocking=True)

    def room_for(self, tensor: Tensor) -> Tensor:
        """Allocates host memory for a tensor. The storage has exactly its size, because torch saves whole storages."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        ends = zip(self._buckets, self._filled, strict=True)
        number = next((number for number, (bucket, filled) in enumerate(ends) if filled + size <= bucket.nbytes), None)
        if number is None:
            number = self._add_bucket(size)
        start, self._filled[number] = self._filled[number], self._filled[number] + size
        memory = self._buckets[number].numpy()
        return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)

    def _add_bucket(self, least: int) -> int:
        size = 1 << (max(least, BUCKET_BYTES) - 1).bit_length()
        self._buckets.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        self._filled.append(0)
        return len(self._buckets) - 1


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies the arrays to the device, next to each other in one allocation.

    A GPU receives them in one asynchronous copy from pinned memory, ordered on the current stream. Separate copies from
    pageable memory would each block while the device is idle.
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
