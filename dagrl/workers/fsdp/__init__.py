"""Train workers on transformers' models under FSDP2. Importing this is cheap; torch is imported when a worker is set up.

model      `architecture.py` finds the model's class, `model.py` shards and loads it, `output.py` has what its class does
           to logits, `attention.py` torch's kernel for packed rows, `context.py` rows split over ranks
training   `trainer.py` runs microbatches and makes the optimizer step
weights    `sent.py` for refits and exports; `trainer.py` for checkpoints
"""

from dagrl.workers.fsdp.worker import FsdpTeacherWorker, FsdpValueWorker, FsdpWorker

__all__ = ["FsdpTeacherWorker", "FsdpValueWorker", "FsdpWorker"]
