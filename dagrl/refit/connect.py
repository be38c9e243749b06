"""Connects two worker groups for refits: asks both what they hold, plans once, and opens the channel between them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dagrl.channels.spec import ChannelKind, ChannelSpec
from dagrl.errors import RefitPlanError
from dagrl.refit.plan.planner import TIED_HEAD, RefitPlan, plan_refit
from dagrl.refit.slices import WeightSlice
from dagrl.refit.transfers import RankPlan, Verify
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.phase import Input, Phase, Shard, Value, join, phase

if TYPE_CHECKING:
    import torch

    from dagrl.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_UNKNOWN = object()


class RefitWorker(Protocol):
    """A worker that sends or receives weights.

    Optional: `weight_tensors() -> Mapping[str, Tensor]` returns these tensors by name, to tell which GPU holds them;
    `weight_config() -> Mapping[str, Json]` returns the keys of the model's configuration that decide what it computes. A
    refit is refused between workers that differ in one of these keys.
    """

    def weight_slices(self) -> Sequence[WeightSlice]:
        """Returns the parts of the model that the worker holds, and the tensors that they are in."""

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec, /) -> None:
        """Opens the channel. Called on all workers at once, and again for a new plan."""


@phase
def refit(train: Shard, generation: Shard, version: Input) -> Value:
    """Sends every weight to the generation workers and commits it as one policy version."""
    sent = train.map("send_weights", version)
    received = generation.map("receive_weights", version)
    return join(sent, received)


@dataclass(frozen=True, eq=False)
class Refit:
    """A train group and a generation group, connected for refits.

        refit = Refit.connect(train, generation, dtype="bfloat16", verify="checksum")
        print(refit)                                     # bytes per pair of ranks, staging memory, shortest possible time
        scheduler = Scheduler([train, generation])
        scheduler.add(refit.phase, warmup_value=0)
        scheduler.compile()
        scheduler.warmup()
        reports = scheduler.replay(refit.phase, version).result()

    `plan` is the plan of all ranks. `phase` runs it; its roles are `train` and `generation`, its input is the policy
    version. Each shard's result is a list of `RefitReport`s. After a failure that broke the channel, connect again.
    """

    plan: RefitPlan
    phase: Phase = refit

    @classmethod
    def connect(
        cls,
        train: WorkerGroup,
        generation: WorkerGroup,
        *,
        dtype: str,
        target_dtype: str | None = None,
        tied_embeddings: bool = False,
        kind: ChannelKind | None = None,
        verify: Verify = "off",
        timeout_s: float = 60.0,
        connect_timeout_s: float = 600.0,
    ) -> Refit:
        """Plans the refit and prepares every worker of both groups for it.

        Workers need `weight_slices()` and `prepare_refit(plan, channel)`; train workers also `send_weights(version)`,
        generation workers `receive_weights(version)`; on GPUs both need `weight_tensors()`. If all of them have
        `weight_config()`, the model configurations that it returns must be equal. Channel ranks are the train ranks, then
        the generation ranks.

        - `dtype`: of the train weights, such as `bfloat16`. `target_dtype`: of the generation weights that are not FP8, if
          it differs.
        - `tied_embeddings`: fill a generation head of its own from the embedding.
        - `kind`: of the channel. None chooses `gloo` without GPUs, `ipc` where workers of one host share a GPU, else `nccl`.
        - `verify`: `off` or `checksum`.
        - `timeout_s`: limit of every wait in a refit. `connect_timeout_s`: limit of this call.

        Raises RefitPlanError before any channel is opened if the groups cannot be connected.
        """
        from dagrl.runtime.worker_group import call_together, free_address  # imports Ray

        deadline = Deadline(connect_timeout_s, "timeouts.start_s")
        _check_methods(train)
        _check_methods(generation)
        if all("weight_config" in group.role.methods for group in (train, generation)):
            check_configs(train.call("weight_config"), generation.call("weight_config"))
        names = [location.host for group in (train, generation) for location in group.locations]
        hosts = list(map(list(dict.fromkeys(names)).index, names))  # as numbers
        devices = [*train.call_function(device_of), *generation.call_function(device_of)]
        kind = kind or choose_kind(devices)
        check_devices(kind, hosts, devices)
        plan = plan_refit(
            distinct_slices(train),
            distinct_slices(generation),
            dtype=dtype,
            target_dtype=target_dtype,
            aliases=TIED_HEAD if tied_embeddings else None,
            hosts=hosts,
            mailboxes=kind == "ipc",
            devices=devices if kind == "ipc" else (),
        )
        connected = cls(plan)
        logger.debug("refit plan: %s", connected)

        address = train.call_function(free_address, deadline=deadline)[0]
        arguments = [
            (plan.for_rank(rank, verify), ChannelSpec(kind, address, rank, plan.size, timeout_s))
            for rank in range(plan.size)
        ]
        offset = train.layout.world_size
        call_together(
            [(train, "prepare_refit", arguments[:offset]), (generation, "prepare_refit", arguments[offset:])],
            deadline=deadline,
        )
        return connected

    def __str__(self) -> str:
        return str(self.plan.summary())


def distinct_slices(group: WorkerGroup) -> list[Sequence[WeightSlice]]:
    """Returns each rank's slices. Of ranks with equal slices only the first sends them to the driver."""
    digests: list[str] = group.call_function(slices_digest)
    senders = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    sent = group.call_function(slices_if, group.role.name, tuple(sorted(senders.values())))
    return [sent[senders[digest]] for digest in digests]


def slices_digest(worker: RefitWorker) -> str:
    """Returns a digest that is equal for equal slices. Runs in a worker."""
    import hashlib

    digest = hashlib.sha256()
    for weight in worker.weight_slices():
        digest.update(f"{weight.name} {weight.box} {weight.tensor} {weight.local} {weight.dtype} {weight.scales}\n".encode())
    return digest.hexdigest()


def slices_if(worker: RefitWorker, role: str, ranks: tuple[int, ...]) -> list[WeightSlice]:
    """Returns the worker's slices if its rank in `role` is in `ranks`, otherwise an empty list. Runs in a worker."""
    from dagrl.runtime.executors.node import state_of

    return list(worker.weight_slices()) if state_of(worker).members[role].rank in ranks else []


def device_of(worker: object) -> str:
    """Returns the UUID of the GPU that holds the worker's weights; empty for a CPU. Runs in a worker."""
    import torch

    tensors: Mapping[str, torch.Tensor] = getattr(worker, "weight_tensors", dict)()
    return device_name(next((tensor.device for tensor in tensors.values()), torch.device("cpu")))


def device_name(device: torch.device) -> str:
    """Returns the UUID of a GPU; empty for a CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def choose_kind(devices: Sequence[str]) -> ChannelKind:
    """Returns the channel kind for ranks on these GPUs (empty: on a CPU)."""
    gpus = [device for device in devices if device]
    if not gpus:
        return "gloo"
    return "nccl" if len(set(gpus)) == len(gpus) else "ipc"


def check_devices(kind: ChannelKind, hosts: Sequence[int], devices: Sequence[str]) -> None:
    """Raises RefitPlanError if a channel of `kind` cannot join ranks on these hosts and GPUs (empty: on a CPU)."""
    if kind == "ipc" and len(set(hosts)) > 1:
        raise RefitPlanError(
            f"an ipc channel joins processes of one host, but the workers are on {len(set(hosts))} hosts; put colocated "
            "workers on one host, or give train and generation workers separate GPUs"
        )
    seen: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if kind == "nccl" and not device:
            raise RefitPlanError(
                f"an nccl channel joins GPUs, but rank {rank} of the refit has its weights on a CPU; put the weights of all "
                "ranks on GPUs, or use a gloo channel with all on CPUs"
            )
        if kind == "nccl" and device in seen:
            raise RefitPlanError(
                f"ranks {seen[device]} and {rank} of the refit share GPU {device}, which NCCL does not support; set "
                "policy.generation.colocated.enabled=true to use an ipc channel, or give each worker its own GPU"
            )
        seen[device] = rank


def check_configs(train: Sequence[Mapping[str, Any]], generation: Sequence[Mapping[str, Any]]) -> None:
    """Raises RefitPlanError unless all workers describe the same model; names the keys and workers that differ."""
    reference = train[0]
    workers = [
        *(("train", rank, model) for rank, model in enumerate(train)),
        *(("generation", n, model) for n, model in enumerate(generation)),
    ]
    for role, rank, config in workers:
        keys = sorted(key for key in {*reference, *config} if reference.get(key, _UNKNOWN) != config.get(key, _UNKNOWN))
        if keys:
            differences = "; ".join(f"{key} is {_value(reference, key)} and {_value(config, key)}" for key in keys[:4])
            more = f" and {len(keys) - 4} more keys" if len(keys) > 4 else ""
            raise RefitPlanError(
                f"the models of train worker 0 and {role} worker {rank} differ: {differences}{more}; give both the same "
                "model directory"
            )


def _check_methods(group: WorkerGroup) -> None:
    if missing := [method for method in ("weight_slices", "prepare_refit") if method not in group.role.methods]:
        raise RefitPlanError(
            f"the {group.role.name} worker has no {' and no '.join(missing)}, which a refit calls; add the methods in the "
            "table of docs/refit.md"
        )


def _value(config: Mapping[str, Any], key: str) -> str:
    return repr(config[key]) if key in config else "missing"
