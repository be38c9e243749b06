"""vLLM's plugin of dagrl, an entry point of `vllm.general_plugins`: the backend `dagrl` for weight transfers.

    LLM(model, weight_transfer_config={"backend": "dagrl"})

vLLM loads it in every process, before it makes a model. It adds the engine's and the trainer's end (`transfer.py`) to vLLM's
factories, and a loader that keeps what a refit needs, only in engines with this backend.
"""

from __future__ import annotations

BACKEND = "dagrl"


def register() -> None:
    """Registers backend and loader. Does nothing the second time."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from dagrl.workers.vllm.loader import register_for_transfers

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "dagrl.workers.vllm.transfer", "DagrlEngine")
    WeightTransferTrainerFactory.register_engine(BACKEND, "dagrl.workers.vllm.transfer", "DagrlTrainer")
    register_for_transfers(BACKEND)
