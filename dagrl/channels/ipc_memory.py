"""Memory that another process of the host can map: anonymous files, CUDA IPC handles, and live tensors lent to it (`Loans`).

Neither leaks when its process is killed: host memory is an anonymous file, like the memory of edges
(`dagrl.runtime.edges.memory`), and CUDA frees the memory of a dead process. The owner of a segment calls its constructor,
the other side calls `attach` with the segment's `handle`.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dagrl.errors import ChannelError, MissingDependencyError
from dagrl.runtime.edges.memory import EdgeClosedError, MemoryAddress, anonymous_memory, open_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dagrl.channels.spec import ChannelSpec

BORROWED, ASKED = 4, 5
"""Columns of the channel's table, in the row of lender and borrower: what is lent is mapped; the lender wants it back."""

_LISTEN_S = 5e-3


def create_segment(nbytes: int, device: torch.device) -> Segment:
    """Allocates memory that other processes can attach."""
    return DeviceSegment(nbytes, device) if device.type == "cuda" else HostSegment(nbytes)


def attach_segment(handle: str) -> Segment:
    """Attaches to the segment of another process. Raises ChannelError if this process cannot reach it."""
    kind, _, rest = handle.partition(":")
    return DeviceSegment.attach(rest) if kind == "cuda" else HostSegment.attach(rest)


class HostSegment:
    """Anonymous shared memory of this host."""

    def __init__(self, nbytes: int) -> None:
        address = anonymous_memory()
        try:
            os.ftruncate(address.descriptor, nbytes)
            self._use(mmap.mmap(address.descriptor, nbytes))
        except BaseException:
            os.close(address.descriptor)
            raise
        self._descriptor: int | None = address.descriptor  # stays open: peers open the memory through it
        self.handle = "host:" + ":".join(map(str, astuple(address)))

    @classmethod
    def attach(cls, rest: str) -> HostSegment:
        """Attaches to a segment; `rest` is its handle without the kind."""
        segment = cls.__new__(cls)
        segment._descriptor, segment.handle = None, f"host:{rest}"
        try:
            segment._use(open_memory(MemoryAddress(*map(int, rest.split(":")))))
        except (OSError, EdgeClosedError) as error:
            raise ChannelError(
                f"the shared memory of a peer cannot be opened: {error}; run all processes of an ipc channel on one host, "
                "as one user, and where they see each other in /proc"
            ) from error
        return segment

    def _use(self, memory: mmap.mmap) -> None:
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # the mapping ends with its last view

    def close(self) -> None:
        """Closes the descriptor and drops the mapping, which ends with the last tensor that uses it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self.bytes = self.bytes.new_empty(0)


class DeviceSegment:
    """Memory of one GPU, allocated by CUDA directly: torch's allocators may return memory without an IPC handle."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._runtime, self._device, self._owned = cuda_runtime(), device, True
        with torch.cuda.device(device):
            pointer = self._runtime.malloc(nbytes)
        self._pointer: int | None = pointer
        self.handle = device_handle(pointer, nbytes, device)
        self.bytes = _as_tensor(pointer, nbytes, device)

    @classmethod
    def attach(cls, rest: str) -> DeviceSegment:
        """Attaches to a segment; `rest` is its handle without the kind."""
        uuid, size, handle = rest.split(":")
        segment = cls.__new__(cls)
        segment._runtime, segment._owned, segment.handle = cuda_runtime(), False, f"cuda:{rest}"
        segment._device = _device_of(uuid)
        with torch.cuda.device(segment._device):
            segment._pointer = segment._runtime.ipcOpenMemHandle(base64.b64decode(handle))
        assert segment._pointer is not None
        segment.bytes = _as_tensor(segment._pointer, int(size), segment._device)
        return segment

    def close(self) -> None:
        """Frees the memory if this process owns it, otherwise unmaps it."""
        if self._pointer is None:
            return
        with torch.cuda.device(self._device):
            (self._runtime.free if self._owned else self._runtime.ipcCloseMemHandle)(self._pointer)
        self._pointer = None


Segment = HostSegment | DeviceSegment
"""`bytes` is the memory as a vector of uint8; another process attaches to it with `handle`."""


def device_handle(pointer: int, nbytes: int, device: torch.device) -> str:
    """Returns the handle of memory that CUDA allocated at `pointer`. Raises CUDARuntimeError if it cannot be mapped."""
    with torch.cuda.device(device):
        handle = base64.b64encode(cuda_runtime().ipcGetMemHandle(pointer)).decode()
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}:{nbytes}:{handle}"


def _as_tensor(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns device memory as a tensor of bytes, through numba's `__cuda_array_interface__`."""
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


def _device_of(uuid: str) -> torch.device:
    """Returns the GPU's device in this process. Raises ChannelError if this process does not see it."""
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise ChannelError(
            f"a peer's memory is on GPU {uuid}, which this process does not see ({', '.join(visible) or 'it sees none'}); "
            "set CUDA_VISIBLE_DEVICES of both processes to all GPUs of the host"
        )
    return torch.device("cuda", visible.index(uuid))


def cuda_runtime() -> Any:
    """Returns cupy's functions of the CUDA runtime. Raises MissingDependencyError without cupy."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise MissingDependencyError(
            f"an ipc channel between GPU tensors needs cupy ({error}); install dagrl[cu13] or dagrl[cu12]"
        ) from error
    return runtime


class Loans:
    """The tensors that one rank of a channel lends to others on the same GPU and borrows. `table` is the channel's, once it
    is mapped. They are read where they are, without a copy in between.

    The lender tells where its tensors lie in its allocations, and how to map these. Only memory of `cudaMalloc` can be
    mapped: not that of torch's expandable segments, and nothing on the host.

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
