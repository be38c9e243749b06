"""A disk of its own for a run's directory: an ext4 file system in a file, which can be full, slow, or refuse writes."""

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE = 256 << 20
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
GETFLAGS, SETFLAGS, IMMUTABLE = 0x80086601, 0x40086602, 0x10
PIECE = 1 << 20


class Disk:
    """A mounted file system at `path`."""

    def __init__(self, image: Path, path: Path) -> None:
        self.path = path
        self.image = image
        path.mkdir(parents=True)
        with image.open("wb") as file:
            file.truncate(SIZE)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(path))

    def close(self) -> None:
        _run("umount", str(self.path))
        self.image.unlink()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Takes all bytes that are left."""
        filler = self.path / ".filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * PIECE)
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Makes writes wait, as for a disk that does not answer."""
        directory = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(directory, FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(directory, FITHAW, 0)
            os.close(directory)

    @contextmanager
    def immutable(self, directory: Path) -> Iterator[None]:
        """Makes a directory refuse new names, also from root."""
        _set_immutable(directory, True)
        try:
            yield
        finally:
            _set_immutable(directory, False)


def _set_immutable(directory: Path, on: bool) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(descriptor, GETFLAGS, struct.pack("l", 0)))
        fcntl.ioctl(descriptor, SETFLAGS, struct.pack("l", flags | IMMUTABLE if on else flags & ~IMMUTABLE))
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
