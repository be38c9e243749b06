"""Train workers on FSDP2: of a policy, of a critic or reward model, and of a teacher."""

from __future__ import annotations

from dagrl.workers.fsdp.backend import FsdpBackend
from dagrl.workers.train.worker import TrainWorker, ValueWorker

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
