"""Anonymous files that the processes of one host map, and the errors of edges.

An edge's memory, and that of an ipc channel on the host, is an anonymous file (memfd_create(2)). Other processes of the same
user open it through `/proc/<pid>/fd` of its owner. It ends with the last process that maps it and leaves nothing in
`/dev/shm`.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.errors import RunError

LINE = 64
"""Bytes of a cache line. Words that different processes write are on different lines."""


class EdgeClosedError(RunError):
    """The edge was closed, or the process at its other end is gone."""


class EdgeLostError(EdgeClosedError):
    """An edge to another host ended although this process did not close it."""


class EdgeTimeoutError(RunError):
    """No message, or no room for one, in time."""


class MessageTooLargeError(RunError):
    """A message does not fit a slot."""


@dataclass(frozen=True)
class MemoryAddress:
    """The address of memory for other processes: the owner's descriptor, and the file that it must refer to."""

    pid: int
    descriptor: int
    device: int
    inode: int  # because the system reuses descriptors for other files


def anonymous_memory() -> MemoryAddress:
    """Creates an empty memory of this process; `os.ftruncate` sizes it. Pages exist once they are touched."""
    descriptor = os.memfd_create("dagrl")
    status = os.fstat(descriptor)
    return MemoryAddress(os.getpid(), descriptor, status.st_dev, status.st_ino)


def open_memory(address: MemoryAddress) -> mmap.mmap:
    """Maps the memory of another process. Raises EdgeClosedError if that process is gone or has closed it."""
    try:
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR)
    except OSError as error:
        raise EdgeClosedError(f"the process {address.pid} that made this memory cannot be reached: {error}") from error
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (address.device, address.inode):
            raise EdgeClosedError(f"the process {address.pid} that made this memory is gone, or has closed it")
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def aligned(size: int) -> int:
    """Rounds `size` up to whole cache lines."""
    return -(-size // LINE) * LINE


def cut(whole: memoryview, offset: int, sizes: Sequence[int]) -> list[memoryview]:
    """Returns views of the parts of a message, of these sizes, each starting on a cache line, from `offset` on."""
    views = []
    for size in sizes:
        views.append(whole[offset : offset + size])
        offset += aligned(size)
    return views
