"""Peers: tensor-parallel ranks tell each other which requests ended, before one of them runs another batch than the rest.

Each rank samples for itself. Ranks that drew different tokens still run batches of one shape, and are found out when the
quantum is over (`dagrl.generation`); but a token that ends a request on one rank alone changes the next batch there, and
its collectives would meet others or none. So whoever sees a request end, or the quantum, asks the others first. An exchange
between processes takes 0.1 ms or more, which is too much for every step of 5 ms: steps in which nothing ends have none.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING

from dagrl.generation import disagreement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NONE = -(1 << 63)


class Peers:
    """The ranks of one engine, over a process group of the CPU's; `most` requests end in a step at most."""

    def __init__(self, group: ProcessGroup, most: int, timeout_s: float) -> None:
        self._group = group
        self._most = most
        self._timeout_s = timeout_s

    def compare(self, step: int, ended: Collection[int]) -> None:
        """Collective: raises RunError that names a request which ended in `step` of the quantum on some ranks alone."""
        every = [set(row) - {_NONE} for row in self._exchange(step, sorted(ended))]
        common = set.intersection(*every)
        for request in sorted(set.union(*every) - common):
            ranks = [rank for rank, own in enumerate(every) if request in own]
            raise disagreement(f"request {request} ended on rank {ranks} of {len(every)} alone, with engine step {step}")

    def _exchange(self, step: int, ended: list[int]) -> list[list[int]]:
        import torch

        ours = torch.tensor(ended + [_NONE] * (self._most - len(ended)), dtype=torch.int64)
        every = [torch.empty_like(ours) for _ in range(self._group.size())]
        try:
            self._group.allgather([every], [ours]).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise disagreement(
                f"requests {ended} ended on rank {self._group.rank()} with engine step {step}, and within "
                f"timeouts.collective_s = {self._timeout_s:g} s not every other rank came to where one ends ({error})"
            ) from error
        return [row.tolist() for row in every]
