"""Megatron-Core's own resharding next to dagrl's refit over the same tensors, from Megatron modules to Megatron modules.

Each side builds its modules among its own ranks, in its own layout. Then all ranks join one world, whose groups tell the
resharding each side's layout. `megatron.core.resharding` (0.16) wants a model of each side on every rank; a module without
parameters stands in for a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.refit_sides import megatron_model, modules_side
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron import groups

_AXES = ("tp", "cp", "dp", "pp")


class Resharding:
    """One rank of both models; `side` is its share. Creating it and `run` are collective over all ranks.

    Each side's ranks meet at one of the first two `addresses`, all ranks at the third.
    """

    def __init__(self, case: RefitCase, rank: int, addresses: Sequence[str], device: torch.device, timeout_s: float) -> None:
        import megatron.core.resharding  # noqa: F401  # must precede the adaptation to machines without GPUs

        first = case.train.world_size
        self._is_source, self._device = rank < first, device
        layout, mine = (case.train, rank) if self._is_source else (case.generation, rank - first)
        self._model = megatron_model(case, layout, mine, addresses[not self._is_source], device)
        self.side = modules_side((case.sources() + case.destinations())[rank], self._model)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{addresses[2]}",
            rank=rank,
            world_size=case.ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        self._groups = _groups(case, rank)

    def swap(self) -> Callable[[], Any]:
        """Returns a function that reshards all weights once and returns when they have arrived on this rank."""
        from megatron.core.resharding import swap_model_weights

        chunk = self._model.chunks[0]
        nothing = torch.nn.Module()
        nothing.config, nothing.pg_collection = chunk.config, self._groups
        chunk.pg_collection = self._groups
        models = (chunk, nothing) if self._is_source else (nothing, chunk)
        on_gpu = self._device.type == "cuda"

        def run() -> None:
            swap_model_weights(*models, refit_method="nccl" if on_gpu else "gloo")
            if on_gpu:
                torch.cuda.synchronize()

        return run

    def close(self) -> None:
        """Leaves the common world."""
        from megatron.core.resharding import clear_service_cache

        clear_service_cache()  # cached services hold the world's groups
        self._model = self._groups = None
        groups.end_groups()


def _groups(case: RefitCase, rank: int) -> Any:
    """Returns the groups of this rank's side in the common world. All ranks create both sides' groups, in one order."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    mine = {}
    for layout, first in ((case.train, 0), (case.generation, case.train.world_size)):
        for axis in ("tp", "dp", "pp"):
            for ranks in _along(layout, axis):
                group = dist.new_group([first + one for one in ranks])
                if rank - first in ranks:
                    mine[axis] = group
    return ProcessGroupCollection(**mine)


def _along(layout: ParallelLayout, axis: str) -> Iterator[list[int]]:
    """Yields the groups of ranks whose coordinates differ only along `axis`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        groups.setdefault(tuple(getattr(at, one) for one in _AXES if one != axis), []).append(rank)
    yield from groups.values()
