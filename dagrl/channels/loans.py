"""Live tensors that a process lends to others on the same GPU, which read them where they are, without a copy in between.

The lender tells where its tensors lie in its allocations, and how to map these. Only memory of `cudaMalloc` can be mapped:
not that of torch's expandable segments, and nothing on the host.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from dagrl.channels.ipc_memory import Segment, attach_segment, cuda_runtime, device_handle

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dagrl.channels.spec import ChannelSpec

BORROWED, ASKED = 4, 5
"""Columns of the channel's table, in the row of lender and borrower: what is lent is mapped; the lender wants it back."""
_LISTEN_S = 5e-3


class Loans:
    """The tensors that one rank of a channel lends and borrows. `table` is the channel's, once it is mapped.

    What is borrowed stays mapped until its lender asks for it, which a thread of the borrower looks for.
    """

    table: npt.NDArray[np.int64]

    def __init__(self, spec: ChannelSpec) -> None:
        self._spec, self._count = spec, 0
        self._described: dict[int, tuple[int, str]] = {}  # by lender: the number of the loan, and its description
        self._borrowed: dict[int, Borrowed] = {}
        self._lock = threading.Lock()

    def lend(self, tensors: Mapping[str, torch.Tensor], publish: Callable[[str, str], None]) -> int:
        """Lets ranks on the same GPU read `tensors`. Returns the number for `borrow`; 0 if some memory cannot be mapped.

        `publish` takes a key and a description. Call `reclaim` before the memory is freed.
        """
        description = _describe(tensors)
        if not description:
            return 0
        self._count += 1
        publish(f"lent/{self._spec.rank}/{self._count}", description)
        return self._count

    def borrow(self, peer: int, number: int, load: Callable[[str], str]) -> Borrowed:
        """Maps what `peer` has lent under `number`, unless it is mapped. `load` gets a description by its key."""
        known, description = self._described.get(peer, (0, ""))
        if known != number:
            description = load(f"lent/{peer}/{number}")
        with self._lock:
            if known != number and peer in self._borrowed:
                self._borrowed.pop(peer).close()
            self._described[peer] = number, description
            if peer not in self._borrowed:
                row = self.table[peer * self._spec.size + self._spec.rank]
                row[BORROWED] = 1
                try:
                    self._borrowed[peer] = Borrowed(description)
                finally:
                    row[BORROWED] = peer in self._borrowed
                if len(self._borrowed) == 1:
                    threading.Thread(target=self._listen, name="dagrl-loans", daemon=True).start()
            return self._borrowed[peer]

    def give_back(self) -> None:
        """Unmaps everything; the tensors must not be used any more."""
        with self._lock:
            for peer, one in self._borrowed.items():
                one.close()
                self.table[peer * self._spec.size + self._spec.rank, BORROWED] = 0
            self._borrowed = {}

    def reclaim(self, lives: Mapping[int, object], wait: Callable[[Callable[[], bool]], None]) -> None:
        """Returns when no peer maps what this rank has lent. `lives` are true while a peer lives; `wait` has a deadline."""
        for peer, life in lives.items():
            row = self.table[self._spec.rank * self._spec.size + peer]
            row[ASKED] = 1
            wait(lambda row=row, life=life: not (row[BORROWED] and life))  # type: ignore[misc]
            row[ASKED] = 0

    def _listen(self) -> None:
        """Returns all loans as soon as a lender asks; ends when nothing is borrowed."""
        while self._borrowed:
            if any(self.table[peer * self._spec.size + self._spec.rank, ASKED] for peer in list(self._borrowed)):
                self.give_back()
            time.sleep(_LISTEN_S)


class Borrowed:
    """Mapped tensors of another process."""

    def __init__(self, description: str) -> None:
        handles, self._lent = json.loads(description)
        self._segments = list[Segment]()
        try:
            for handle in handles:
                self._segments.append(attach_segment(handle))
        except BaseException:
            self.close()  # the caller gets no object to close
            raise
        self.addresses = [segment.bytes.data_ptr() for segment in self._segments]
        """The addresses of the lender's allocations in this process."""

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, (number, offset, dtype, shape, stride) in self._lent.items():
            kind = getattr(torch, dtype)
            last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            memory = self._segments[number].bytes[offset : offset + (last + 1) * kind.itemsize]
            tensors[name] = memory.view(kind).as_strided(shape, stride)
        return tensors

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


@dataclass(frozen=True)
class Allocation:
    """Memory of this process that tensors are in: its first address, and its bytes."""

    start: int
    nbytes: int
    device: torch.device

    def handle(self) -> str:
        """Returns what `attach_segment` takes; empty if other processes cannot map the memory."""
        try:
            return device_handle(self.start, self.nbytes, self.device)
        except cuda_runtime().CUDARuntimeError:
            return ""


def allocation_of(tensor: torch.Tensor) -> Allocation | None:
    """Returns the allocation that holds a tensor; None if it is not memory of a GPU."""
    if not tensor.is_cuda:
        return None
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    with torch.cuda.device(tensor.device):
        address = ctypes.c_uint64(tensor.data_ptr())
        error = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), address)
    return None if error else Allocation(start.value, size.value, tensor.device)


def _describe(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns what `Borrowed` needs to reach `tensors`; empty if other processes cannot map some of their memory."""
    numbers: dict[Allocation, int] = {}
    lent = {}
    for name, tensor in tensors.items():
        memory = allocation_of(tensor)
        if memory is None:
            return ""
        number, offset = numbers.setdefault(memory, len(numbers)), tensor.data_ptr() - memory.start
        lent[name] = (number, offset, str(tensor.dtype).partition(".")[2], list(tensor.shape), list(tensor.stride()))
    handles = [memory.handle() for memory in numbers]
    return json.dumps([handles, lent]) if all(handles) else ""
