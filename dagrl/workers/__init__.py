"""The workers that dagrl ships: `megatron` trains, `vllm` generates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagrl.run.worker_protocols import (
        BackgroundSaver,
        CheckpointChecker,
        GenerationWorker,
        HuggingFaceExporter,
        ModelHooks,
        ReferenceHolder,
        RolloutTrainWorker,
        SleepingEngine,
        StateOffloader,
    )
    from dagrl.runtime.worker import WorkerHooks
    from dagrl.workers.megatron.worker import MegatronWorker
    from dagrl.workers.vllm.worker import VllmWorker

    def _megatron_fits(
        worker: MegatronWorker,
    ) -> tuple[
        RolloutTrainWorker,
        BackgroundSaver,
        CheckpointChecker,
        HuggingFaceExporter,
        ReferenceHolder,
        StateOffloader,
        ModelHooks,
        WorkerHooks,
    ]:
        return worker, worker, worker, worker, worker, worker, worker, worker

    def _vllm_fits(worker: VllmWorker) -> tuple[GenerationWorker, SleepingEngine, ModelHooks, WorkerHooks]:
        return worker, worker, worker, worker
