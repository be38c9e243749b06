"""Memory that another process on the same host can map: anonymous files on the host, CUDA IPC handles on GPUs.

Neither leaks when its process is killed: host memory is an anonymous file, like the memory of edges
(`dagrl.runtime.edges.memory`), and CUDA frees the memory of a dead process. The owner of a segment calls its constructor,
the other side calls `attach` with the segment's `handle`.
"""

from __future__ import annotations

import base64
import mmap
import os
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import torch

from dagrl.errors import ChannelError, MissingDependencyError
from dagrl.runtime.edges.memory import EdgeClosedError, MemoryAddress, anonymous_memory, open_memory


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
