"""The worker of the overhead benchmarks: it does nothing, so that what is measured is the way there and back."""

from __future__ import annotations

import os
import time

import numpy as np
import numpy.typing as npt

from dagrl.executors.memory import copied_bytes

SMALL = 100
"""Bytes up to which a payload is a byte string, as in Ray's own microbenchmarks; larger ones are arrays, as batches are."""

Payload = bytes | npt.NDArray[np.uint8]


def payload(size: int) -> Payload:
    """A value of `size` bytes."""
    return b"x" * size if size <= SMALL else np.full(size, 7, dtype=np.uint8)


class BenchWorker:
    """Answers every input with a value of a size that was set before."""

    def __init__(self, context: object = None, config: object = None) -> None:
        self.result = payload(SMALL)

    def step(self, value: object) -> Payload:
        """One step: the input is there, the result goes back."""
        return self.result

    def echo(self, value: object) -> object:
        """The input itself."""
        return value

    def size(self, value: Payload) -> int:
        """Bytes of the input."""
        return len(value)

    def set_result(self, size: int) -> None:
        """Answer with `size` bytes from now on."""
        self.result = payload(size)

    def merge(self, parts: list[object]) -> object:
        """Join results into one."""
        return parts[0]

    def copied(self) -> int:
        """Bytes that this process has copied into edges and out of them."""
        return copied_bytes()

    def cpu_s(self) -> float:
        """Processor time that this process has used."""
        return time.process_time()

    def pid(self) -> int:
        """The worker's process."""
        return os.getpid()
