"""Staging: copies of train state in host memory, which a checkpoint is written from while training goes on.

On a GPU they lie in pinned memory, which the device copies to at the speed of its link: training stands still for that time
alone. Torch keeps pinned memory of a process for its next use, so that it is allocated in the first save only; it rounds up
to powers of two, so that copies lie side by side in buckets of such sizes. Imported only where torch is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.megatron.offload import BUCKET_BYTES

ALIGNMENT = 16  # bytes; of the widest elements


class Staging:
    """The copies of one save. Their memory is given back when they are dropped."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Tensor] = []  # [bytes] each
        self._filled: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self._buckets)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in host memory; of a tensor on a GPU it is complete when the current stream has come so far."""
        return tensor.clone() if tensor.is_cpu else self.room_for(tensor).copy_(tensor, non_blocking=True)

    def room_for(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor of that shape, as a tensor whose storage is no larger: torch saves whole storages."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        number = next((place for place in range(len(self._buckets)) if size <= self._left(place)), None)
        if number is None:
            number = self._add_bucket(size)
        start, self._filled[number] = self._filled[number], self._filled[number] + size
        memory = self._buckets[number].numpy()
        return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)

    def _left(self, number: int) -> int:
        return self._buckets[number].nbytes - self._filled[number]

    def _add_bucket(self, least: int) -> int:
        size = 1 << (max(least, self._bucket_bytes) - 1).bit_length()
        self._buckets.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        self._filled.append(0)
        return len(self._buckets) - 1
