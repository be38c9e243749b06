"""Peers: tensor-parallel ranks compare which requests ended, before their batches can diverge.

Each rank samples by itself. If ranks draw different tokens, their batches still have one shape, and the difference is
detected after the quantum (`dagrl.rl.generation`). But a token that ends a request on one rank only changes that rank's next
batch, and its collectives would no longer match. So ranks compare whenever a request or the quantum ends. The exchange takes
0.1 ms or more, too much for every 5 ms step; steps without an ending skip it.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING

from dagrl.rl.generation import disagreement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NONE = -(1 << 63)


class Peers:
    """The ranks of one engine, connected by a CPU process group. At most `max_ended` requests end per step."""

    def __init__(self, group: ProcessGroup, max_ended: int, timeout_s: float) -> None:
        self._group = group
        self._max_ended = max_ended
        self._timeout_s = timeout_s

    def compare(self, step: int, ended: Collection[int]) -> None:
        """Raises RunError if a request ended in `step` on some ranks only. A collective over the ranks."""
        every = [set(row) - {_NONE} for row in self._exchange(step, sorted(ended))]
        common = set.intersection(*every)
        for request in sorted(set.union(*every) - common):
            ranks = [rank for rank, own in enumerate(every) if request in own]
            raise disagreement(f"request {request} ended in engine step {step} on rank {ranks} of {len(every)} only")

    def _exchange(self, step: int, ended: list[int]) -> list[list[int]]:
        import torch

        ours = torch.tensor(ended + [_NONE] * (self._max_ended - len(ended)), dtype=torch.int64)
        every = [torch.empty_like(ours) for _ in range(self._group.size())]
        try:
            self._group.allgather([every], [ours]).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise disagreement(
                f"requests {ended} ended on rank {self._group.rank()} in engine step {step}, but not on all other ranks "
                f"within timeouts.collective_s = {self._timeout_s:g} s ({error})"
            ) from error
        return [row.tolist() for row in every]
