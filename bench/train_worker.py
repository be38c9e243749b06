"""The worker of `bench train`: a MegatronWorker whose process serves one case after the other."""

from __future__ import annotations

import gc

from dagrl.config import Config
from dagrl.worker import WorkerContext
from workers.megatron import MegatronWorker


class TrainBenchWorker(MegatronWorker):
    """Its `setup` only imports; `become` sets up a worker of any layout, `leave` ends it."""

    def setup(self, address: str) -> None:
        """Import what a worker needs."""
        from workers.megatron import cpu

        cpu.adapt()
        import workers.megatron.optimizer

        assert workers.megatron.optimizer

    def become(self, context: WorkerContext, config: Config, address: str) -> None:
        """A worker of `context.layout`, set up together with the others."""
        self.__init__(context, config)  # type: ignore[misc]
        super().setup(address)

    def leave(self) -> None:
        """Drop the model and leave its groups; the memory is given back."""
        import torch

        self.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int:
        """Bytes that tensors took at most."""
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
