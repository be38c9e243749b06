"""Megatron-Core's own resharding, and a refit of ours over the same tensors: from Megatron modules to Megatron modules.

Both halves are in one world, whose tensor-parallel groups are the two models'. `megatron.core.resharding` (0.16) wants a
model of each side on every rank; where a rank has none, a module without parameters stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.refit_cases import Case
from bench.refit_sides import Side, megatron_model, named_tensors
from dagrl.layout import ParallelLayout
from dagrl.worker import WorkerContext


class Resharding:
    """One rank of both models; `side` is what it holds of them. Collective over all ranks, as is `run`."""

    def __init__(self, case: Case, rank: int, address: str, device: torch.device) -> None:
        from workers.megatron import groups

        half = case.tp
        layout = ParallelLayout(tp=half, dp=2)
        groups.start_groups(WorkerContext("train", rank, layout), address, 0)
        self._model = megatron_model(case, layout, device)
        self._is_source = rank < half
        slices = (case.sources() + case.destinations())[rank]
        self.side = Side(slices, named_tensors(slices, self._model.parameters()), "Megatron-Core modules")
        self._separate(rank)

    def _separate(self, rank: int) -> None:
        """The two models are replicas for Megatron's groups, but not for the resharding: each has data parallelism 1."""
        mine = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
        for chunk in self._model.chunks:
            chunk.pg_collection.dp = mine

    def swap(self) -> Callable[[], Any]:
        """One resharding of all weights; returns when they have arrived on this rank."""
        from megatron.core.resharding import swap_model_weights

        chunk = self._model.chunks[0]
        nothing = torch.nn.Module()
        nothing.config, nothing.pg_collection = chunk.config, chunk.pg_collection
        models = (chunk, nothing) if self._is_source else (nothing, chunk)

        def run() -> None:
            swap_model_weights(*models, refit_method="nccl")
            torch.cuda.synchronize()

        return run

    def close(self) -> None:
        """Leave Megatron's world."""
        from workers.megatron import groups

        self._model = None
        groups.end_groups()
