"""What a run has of its machine: a disk, a wall clock, and a checkpoint that is cut or flipped at any byte of any file.

The disk is an ext4 file system in a file, which can be full, slow, or refuse writes. The wall clock can jump (`clock.c`,
compiled here); all other clocks stay.
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

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


SOURCE = Path(__file__).with_name("clock.c")
TICK_S = 0.05


class Clock:
    """`environment` is for the processes that have this clock."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError or CalledProcessError if there is no C compiler, `cc`."""
        library, self._offset = directory / "clock.so", directory / "clock"
        compiler = shutil.which("cc")
        if compiler is None:
            raise FileNotFoundError("cc, a C compiler, was not found")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
        self._offset.write_bytes(struct.pack("=q", 0))
        self.environment = {"LD_PRELOAD": str(library), "DAGRL_CHAOS_CLOCK": str(self._offset)}
        # By a fast clock a worker's start takes minutes.
        self.environment["RAY_worker_register_timeout_seconds"] = str(10**6)

    @contextmanager
    def ahead(self, seconds: int) -> Iterator[None]:
        """Sets the clock ahead (negative: behind) during the block."""
        try:
            self._set(seconds)
            yield
        finally:
            self._set(0)

    @contextmanager
    def fast(self, times: int) -> Iterator[None]:
        """Runs the clock `times` as fast during the block; it is right again after it."""
        began, ended = time.monotonic(), threading.Event()

        def run() -> None:
            while not ended.wait(TICK_S):
                self._set(round((times - 1) * (time.monotonic() - began)))

        thread = threading.Thread(target=run, name="fast clock")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._set(0)

    def _set(self, seconds: int) -> None:
        with self._offset.open("r+b") as file:  # not replaced: processes have mapped it
            file.write(struct.pack("=q", seconds))


@dataclass(frozen=True)
class Damage:
    """What was done to the newest checkpoint. `harmless`: the file means the same, as spaces of JSON may be other."""

    kind: str
    step: int
    text: str
    harmless: bool


@contextmanager
def damaged(checkpoints: Path, random: Random) -> Iterator[Damage | None]:
    """Damages one byte of the newest checkpoint for the block, or cuts a file there.

    None if there is no checkpoint, or one that is newer and may be whole, without its name: a resumed run would take that.
    """
    found = sorted(checkpoints.glob("step_*"))
    if not found or found[-1].suffix:
        yield None
        return
    newest = found[-1]
    path = random.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    whole = path.read_bytes()
    at = random.randrange(len(whole))
    kind = random.choice(("cut", "flipped"))
    content = whole[:at] if kind == "cut" else whole[:at] + bytes([whole[at] ^ random.randrange(1, 256)]) + whole[at + 1 :]
    path.write_bytes(content)
    harmless = path.name == "manifest.json" and _same(whole, content)
    try:
        yield Damage(kind, int(newest.name[5:]), f"{path.relative_to(newest)} at byte {at} of {len(whole)}", harmless)
    finally:
        if newest.exists():  # a run that took the damage for harmless may have replaced it
            path.write_bytes(whole)


def _same(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False
