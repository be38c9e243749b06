"""Memory that another process on the same host can map: on the host without a name, on a GPU by CUDA's IPC handles.

Neither leaves anything behind when its process is killed: host memory is an anonymous file, as that of edges is
(`dagrl.executors.memory`), and CUDA frees a dead process's memory. The side that makes a segment calls its constructor, the
other one `attach` with the segment's `handle`.
"""

from __future__ import annotations

import base64
import mmap
import os
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Protocol

from dagrl.errors import ChannelError, MissingDependencyError
from dagrl.executors.memory import EdgeClosedError, MemoryAddress, anonymous_memory, open_memory

if TYPE_CHECKING:
    import torch


class Segment(Protocol):
    """`bytes` is the memory as a vector of uint8; `handle` says to another process where it is."""

    bytes: torch.Tensor
    handle: str

    def close(self) -> None:
        """Give the memory, or this process's view of it, back."""


def create_segment(nbytes: int, device: torch.device) -> Segment:
    """Memory of this process for others to attach."""
    return DeviceSegment(nbytes, device) if device.type == "cuda" else HostSegment(nbytes)


def attach_segment(handle: str) -> Segment:
    """The segment of another process. Raises ChannelError when it cannot be reached from here."""
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
        self._descriptor: int | None = address.descriptor  # kept open, for peers to find
        self.handle = "host:" + ":".join(map(str, astuple(address)))

    @classmethod
    def attach(cls, rest: str) -> HostSegment:
        """`rest` is the handle after its kind."""
        segment = cls.__new__(cls)
        segment._descriptor, segment.handle = None, f"host:{rest}"
        try:
            segment._use(open_memory(MemoryAddress(*map(int, rest.split(":")))))
        except (OSError, EdgeClosedError) as error:
            raise ChannelError(
                f"the shared memory of a peer cannot be opened: {error}; an ipc channel joins processes of one user on one "
                "host that see each other in /proc"
            ) from error
        return segment

    def _use(self, memory: mmap.mmap) -> None:
        import torch

        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # the mapping is freed with the last view of it

    def close(self) -> None:
        """Close the descriptor and let go of the mapping, which goes now, or with the last tensor of others that uses it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self.bytes = self.bytes.new_empty(0)


class DeviceSegment:
    """Memory of one GPU, allocated beside torch's (whose allocators may give memory that has no handle)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch

        self._runtime, self._device, self._owned = _cuda_runtime(), device, True
        with torch.cuda.device(device):
            self._pointer: int | None = self._runtime.malloc(nbytes)
            handle = base64.b64encode(self._runtime.ipcGetMemHandle(self._pointer)).decode()
        self.handle = f"cuda:{torch.cuda.get_device_properties(device).uuid}:{nbytes}:{handle}"
        self.bytes = _as_tensor(self._pointer, nbytes, device)

    @classmethod
    def attach(cls, rest: str) -> DeviceSegment:
        """`rest` is the handle after its kind."""
        import torch

        uuid, size, handle = rest.split(":")
        segment = cls.__new__(cls)
        segment._runtime, segment._owned, segment.handle = _cuda_runtime(), False, f"cuda:{rest}"
        segment._device = _device_of(uuid)
        with torch.cuda.device(segment._device):
            segment._pointer = segment._runtime.ipcOpenMemHandle(base64.b64decode(handle))
        assert segment._pointer is not None
        segment.bytes = _as_tensor(segment._pointer, int(size), segment._device)
        return segment

    def close(self) -> None:
        """Free the memory, or unmap it."""
        import torch

        if self._pointer is None:
            return
        with torch.cuda.device(self._device):
            (self._runtime.free if self._owned else self._runtime.ipcCloseMemHandle)(self._pointer)
        self._pointer = None


class _Array:
    """What torch takes device memory from; see numba's `__cuda_array_interface__`."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


def _as_tensor(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.as_tensor(_Array(pointer, nbytes), device=device)


def _device_of(uuid: str) -> torch.device:
    """This process's name of the GPU."""
    import torch

    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise ChannelError(
            f"a peer's memory is on GPU {uuid}, which this process does not see ({', '.join(visible) or 'it sees none'}); "
            "set CUDA_VISIBLE_DEVICES of both to all GPUs of the host"
        )
    return torch.device("cuda", visible.index(uuid))


def _cuda_runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise MissingDependencyError(
            f"an ipc channel between GPU tensors needs cupy ({error}); install dagrl[cu13] or dagrl[cu12]"
        ) from error
    return runtime
