"""Ways of overlapping copies and messages, tried against each other: where the constants of the GPU path come from.

    dagrl bench refit --tune

Each way is measured like any method; the best is kept for the rest of the run. What it sets are constants of
`dagrl/refit/copy_kernel.py`: programs that copy beside messages, their warps and tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """Programs that copy beside messages, the warps of each and the units of 16 bytes of a tile."""

    programs: int
    warps: int = 8
    tile: int = 2048

    @property
    def name(self) -> str:
        """As a method of the report."""
        return f"dagrl {self.programs} programs of {self.warps} warps"

    def use(self) -> None:
        """From now on, in this process; what is bound before must be bound again."""
        from dagrl.refit import copy_kernel

        copy_kernel.PROGRAMS, copy_kernel._WARPS, copy_kernel._TILE = self.programs, self.warps, self.tile


WAYS = (Way(24), Way(32), Way(64), Way(12, 16, 4096), Way(16, 16, 4096), Way(24, 16, 4096))


def best_way(seconds: Callable[[Way], float]) -> Way:
    """Try all; `seconds` measures one, the same on all ranks."""
    taken = {}
    for way in WAYS:
        way.use()
        taken[way] = seconds(way)
    best = min(taken, key=lambda way: taken[way])
    best.use()
    return best
