"""The worker of the overhead benchmarks. It does no work, so the measured time is the round trip alone."""

import os
import time

import numpy as np
import numpy.typing as npt

SMALL = 100
"""Payloads up to this many bytes are byte strings, as in Ray's microbenchmarks; larger ones are arrays, as batches are."""

Payload = bytes | npt.NDArray[np.uint8]


def payload(size: int) -> Payload:
    """Returns a value of `size` bytes."""
    return b"x" * size if size <= SMALL else np.full(size, 7, dtype=np.uint8)


class BenchWorker:
    """Answers every input with a value of a preset size."""

    def __init__(self, context: object = None, config: object = None) -> None:
        self.result = payload(SMALL)
        self.pause_s = 0.0

    def step(self, value: object) -> Payload:
        """Takes the input and returns the preset result, after a preset pause."""
        if self.pause_s:
            time.sleep(self.pause_s)
        return self.result

    def echo(self, value: object) -> object:
        """Returns the input."""
        return value

    def set_result(self, size: int) -> None:
        """Sets the size of later results."""
        self.result = payload(size)

    def set_pause(self, seconds: float) -> None:
        """Sets how long later steps sleep."""
        self.pause_s = seconds

    def merge(self, parts: list[object]) -> object:
        """Joins results into one."""
        return parts[0]

    def cpu_s(self) -> float:
        """Returns the processor time this process has used."""
        return time.process_time()

    def pid(self) -> int:
        """Returns the worker's process id."""
        return os.getpid()
