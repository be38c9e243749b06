"""Megatron-Core's own resharding, and a refit of ours over the same tensors: from Megatron modules to Megatron modules.

Each side builds its modules among its own ranks, in a layout of its own; then all ranks meet in one world, whose groups say
to the resharding how each side lies. `megatron.core.resharding` (0.16) wants a model of each side on every rank; where a
rank has none, a module without parameters stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.refit_cases import Case
from bench.refit_sides import megatron_model, modules_side
from dagrl.layout import ParallelLayout

_AXES = ("tp", "cp", "dp", "pp")


class Resharding:
    """One rank of both models; `side` is what it holds of them. Collective over all ranks, as is `run`.

    The ranks of each side meet at one of the first two `addresses`, all of them at the third.
    """

    def __init__(self, case: Case, rank: int, addresses: Sequence[str], device: torch.device, timeout_s: float) -> None:
        import megatron.core.resharding  # noqa: F401  # before modules are adapted to a machine without GPUs

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
        """One resharding of all weights; returns when they have arrived on this rank."""
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
        """Leave the common world."""
        from megatron.core.resharding import clear_service_cache

        from workers.megatron import groups

        clear_service_cache()  # services keep groups of a world
        self._model = self._groups = None
        groups.end_groups()


def _groups(case: Case, rank: int) -> Any:
    """The groups of this rank's side, made in the common world: all ranks make those of both sides, in one order."""
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
    """The ranks that differ in nothing but `axis`, for each place on the others."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        groups.setdefault(tuple(getattr(at, one) for one in _AXES if one != axis), []).append(rank)
    yield from groups.values()
