"""The worker of `bench train`: a MegatronWorker whose process runs one case after another."""

from __future__ import annotations

import gc

from dagrl.bench.train_parts import StepParts, step_parts
from dagrl.config import Config
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.megatron import MegatronWorker, cpu


class TrainBenchWorker(MegatronWorker):
    """Imports its dependencies in `setup`; `become` sets up a worker of any layout and `leave` releases it."""

    def setup(self, address: str) -> None:
        """Imports what a worker needs."""
        cpu.adapt()
        import dagrl.workers.megatron.trainer

        assert dagrl.workers.megatron.trainer

    def become(self, context: WorkerContext, config: Config, address: str) -> None:
        """Sets up a worker of `context.layout`. Collective over the layout's workers."""
        self.__init__(context, config)  # type: ignore[misc]
        super().setup(address)

    def leave(self) -> None:
        """Drops the model, leaves its process groups and frees the memory."""
        import torch

        self.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def parts(self, batch: Batch) -> StepParts:
        """Runs one step under torch's profiler. Returns where the GPU's time went."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.train_step(batch, "likelihood")
            torch.cuda.synchronize()
        return step_parts(profiler.events())

    def peak_memory(self) -> int:
        """Returns the peak of allocated GPU memory in bytes."""
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
