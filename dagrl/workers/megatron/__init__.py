"""Megatron-Core workers. Importing this is cheap; Megatron itself is imported when a worker is set up.

Where to find what:

    phases     `worker.py` has those of training and refits, `worker_state.py` what is kept between them, `worker_base.py`
               setup and shutdown
    batches    `dagrl.workers.train` makes microbatches of rows, `forward_backward.py` runs the model and computes the loss,
               `trainer.py` makes the optimizer step
    model      `architecture.py` reads `config.json`, `model.py` builds the layers: `attention.py`, `router.py`,
               `dispatch.py` and `experts.py`, and `lora.py` for adapters
    weights    `weights.py` says what each rank holds; `hf_load.py` and `hf_export.py` read and write Hugging Face files,
               `checkpoint.py` (`sharding.py`, `identity.py`) checkpoints
    memory     `reference.py` swaps the weights of the policy and the reference policy
"""

from dagrl.workers.megatron.architecture import check_layout
from dagrl.workers.megatron.worker import MegatronTeacherWorker, MegatronValueWorker, MegatronWorker

__all__ = ["MegatronTeacherWorker", "MegatronValueWorker", "MegatronWorker", "check_layout"]
