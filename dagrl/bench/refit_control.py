"""Coordinates the ranks of a benchmark over their own store: barriers, gathered values, common starts."""

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

Value = TypeVar("Value")
_AHEAD_S = 0.002  # delay of a common start; the store reaches all ranks in less
_POLL_S = 2e-4


class Control:
    """One rank of `size`. All ranks must call the same methods in the same order. Ranks share the host's clock."""

    def __init__(self, port: int, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store = TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=timeout_s))
        self._timeout_s = timeout_s
        self._command, self._number = 0, 0

    def begin(self, command: int) -> None:
        """Starts a command; ranks that failed in the one before are in step again."""
        self._command, self._number = command, 0

    def _key(self) -> str:
        self._number += 1
        return f"{self._command}/{self._number}"

    def barrier(self) -> None:
        """Returns when all ranks have arrived."""
        key, deadline = self._key(), time.monotonic() + self._timeout_s
        arrived = self._store.add(key, 1)
        while arrived < self.size:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self.rank}: {self.size - arrived} ranks did not arrive within {self._timeout_s} s"
                )
            time.sleep(_POLL_S)
            arrived = self._store.add(key, 0)

    def gather(self, value: Value) -> list[Value]:
        """Returns every rank's value."""
        key = self._key()
        self._store.set(f"{key}/{self.rank}", pickle.dumps(value).hex())
        return [pickle.loads(bytes.fromhex(self._store.get(f"{key}/{rank}").decode())) for rank in range(self.size)]  # noqa: S301

    def start_together(self) -> None:
        """Returns at the same instant on all ranks; spins at the end instead of sleeping."""
        self.barrier()
        key = self._key()
        if self.rank == 0:
            self._store.set(key, repr(time.monotonic() + _AHEAD_S))
        start = float(self._store.get(key))
        while time.monotonic() < start:
            pass

    def seconds(self, act: Callable[[], object], rounds: int, warmup: int) -> list[float]:
        """Returns this rank's seconds of each round. All ranks start each round at the same instant."""
        taken = []
        for _ in range(warmup + rounds):
            self.start_together()
            start = time.perf_counter()
            act()
            taken.append(time.perf_counter() - start)
        return taken[warmup:]
