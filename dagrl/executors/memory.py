"""Memory that processes of one host share: anonymous files, how many bytes were copied into them, and what can go wrong.

The memory of an edge, and of an ipc channel on the host, is an anonymous file (memfd_create(2)) that other processes of the
same user open through its maker's `/proc/<pid>/fd`: it ends with the last process that has it mapped and leaves nothing in
`/dev/shm`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.errors import RunError

LINE = 64
"""Bytes of a cache line; what different processes write starts on one of its own."""

_copied = [0]


class EdgeClosedError(RunError):
    """The edge was closed, or the process at its other end is gone."""


class EdgeLostError(EdgeClosedError):
    """An edge to another host ended, and this process did not close it."""


class EdgeTimeoutError(RunError):
    """No message, or no room, in time."""


class MessageTooLargeError(RunError):
    """A message does not fit a slot."""


@dataclass(frozen=True)
class MemoryAddress:
    """Where memory is, for another process: the descriptor that its maker has for it, and which file that must be."""

    pid: int
    descriptor: int
    device: int
    inode: int  # descriptors are used again, for other files


def anonymous_memory() -> MemoryAddress:
    """New memory of this process, of no size yet (`os.ftruncate`); pages exist once they are touched."""
    descriptor = os.memfd_create("dagrl")
    made = os.fstat(descriptor)
    return MemoryAddress(os.getpid(), descriptor, made.st_dev, made.st_ino)


def open_memory(address: MemoryAddress) -> mmap.mmap:
    """Memory that another process made. Raises EdgeClosedError when that process is gone, or has closed it."""
    try:
        opened = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR)
    except OSError as error:
        raise EdgeClosedError(f"the process {address.pid} that made this memory cannot be reached: {error}") from error
    try:
        found = os.fstat(opened)
        if (found.st_dev, found.st_ino) != (address.device, address.inode):
            raise EdgeClosedError(f"the process {address.pid} that made this memory is gone, or has closed it")
        return mmap.mmap(opened, 0)
    finally:
        os.close(opened)


def aligned(size: int) -> int:
    """`size` rounded up to whole cache lines."""
    return -(-size // LINE) * LINE


def cut(whole: memoryview, offset: int, sizes: Sequence[int]) -> list[memoryview]:
    """The parts of a message, of these sizes, each beginning on a cache line, from `offset` on."""
    views = []
    for size in sizes:
        views.append(whole[offset : offset + size])
        offset += aligned(size)
    return views


def count_copied(size: int) -> None:
    """Add to the bytes that this process has copied into edges, or out of them."""
    _copied[0] += size


def copied_bytes() -> int:
    """Bytes that this process has copied into the memory of edges, into sockets, and out of both, since it started."""
    return _copied[0]
