"""Megatron-Core workers. Importing this is cheap; Megatron itself is imported when a worker is set up.

`worker.py` has the worker classes, `backend.py` their model; `dagrl.workers.train` has what needs no Megatron.
Where to find what:

    model      `architecture.py` reads `config.json`, `model.py` builds the layers: `attention.py`, `router.py`
               and `experts.py`, and `lora.py` for adapters
    training   `trainer.py` runs microbatches through Megatron's schedules and makes the optimizer step
    weights    `weights.py` says what each rank holds, `sharding.py` how a checkpoint has it
"""

from dagrl.workers.megatron.architecture import check_layout
from dagrl.workers.megatron.worker import MegatronTeacherWorker, MegatronValueWorker, MegatronWorker

__all__ = ["MegatronTeacherWorker", "MegatronValueWorker", "MegatronWorker", "check_layout"]
