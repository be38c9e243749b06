"""Train workers on transformers' models under FSDP2. Importing this is cheap; torch is imported when a worker is set up.

model      `architecture.py` finds the model's class, `model.py` shards and loads it, `output.py` has what its class does
           to logits, `attention.py` torch's kernel for packed rows, `context.py` rows split over ranks
training   `trainer.py` runs microbatches and makes the optimizer step
weights    `sent.py` for refits and exports; `trainer.py` for checkpoints
"""

from dagrl.workers.fsdp.backend import FsdpBackend
from dagrl.workers.train.worker import TrainWorker, ValueWorker

__all__ = ["FsdpTeacherWorker", "FsdpValueWorker", "FsdpWorker"]

SUPPORTS = frozenset(("sequence_packing.enabled", "deterministic", "optimizer.name", "fsdp_cfg", "megatron_cfg"))
"""`check_settings` says of `megatron_cfg` what to set instead."""


class FsdpWorker(TrainWorker):
    """A train worker of the policy."""

    supports = SUPPORTS | {"peft.enabled", "router_replay"}
    requires = ("transformers",)
    backend_class = FsdpBackend


class FsdpTeacherWorker(FsdpWorker):
    """A worker of a frozen model, such as a teacher: it gives log-probabilities under the weights of `model_name`."""

    trains = False


class FsdpValueWorker(ValueWorker):
    """A worker of a critic or a reward model: values of tokens, and steps on them."""

    supports = SUPPORTS
    requires = ("transformers",)
    backend_class = FsdpBackend
