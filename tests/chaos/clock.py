"""The wall clock of a run's processes, which can jump (`clock.c`, compiled here). All other clocks stay."""

import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
