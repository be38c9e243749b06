"""Joins two worker groups for refits: asks both what they hold, plans once, opens the channel between them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from dagrl.channels.base import ChannelSpec
from dagrl.deadline import Deadline
from dagrl.errors import RefitPlanError
from dagrl.refit.plan import TIED_HEAD, RefitPlan, plan_refit
from dagrl.refit.schedule import LinkSpeeds
from dagrl.refit.slices import WeightSlice
from dagrl.worker_group import WorkerGroup, call_together, free_address

logger = logging.getLogger(__name__)

ChannelKind = Literal["gloo", "nccl", "ipc"]
_UNKNOWN = object()


def connect_refit(
    train: WorkerGroup,
    generation: WorkerGroup,
    *,
    dtype: str,
    target_dtype: str | None = None,
    tied_embeddings: bool,
    kind: ChannelKind,
    timeout_s: float,
    channel_timeout_s: float,
    bucket_bytes: int | None = None,
    replicate_in_host: bool = True,
    speeds: LinkSpeeds | None = None,
) -> RefitPlan:
    """Plan the refit from `train` to `generation` and prepare every worker of both for it.

    `dtype` is that of the train weights, `target_dtype` that of the generation weights not in FP8 (None: the same). With
    `tied_embeddings` a generation head of its own is fed from the embedding. Channel ranks are the train ranks, then the
    generation ranks. Workers that have `weight_config()` are asked for it: the keys of the model's configuration, which
    must be equal. Workers of one host that share a GPU need `kind="ipc"`.
    Raises RefitPlanError before any channel is opened.
    """
    _check_same_model(train, generation)
    hosts = _hosts(train, generation)
    check_devices(kind, hosts, [*train.call_function(device_of), *generation.call_function(device_of)])
    plan = plan_refit(
        distinct_slices(train),
        distinct_slices(generation),
        dtype=dtype,
        target_dtype=target_dtype,
        aliases=TIED_HEAD if tied_embeddings else None,
        bucket_bytes=bucket_bytes,
        hosts=hosts,
        replicate_in_host=replicate_in_host,
        speeds=speeds,
        mailboxes=kind == "ipc",
    )
    logger.debug("refit plan: %s", plan.summary())
    deadline = Deadline(timeout_s, "timeouts.start_s")
    address = train.call_function(free_address, deadline=deadline)[0]
    offset, size = train.layout.world_size, plan.size
    arguments = [(plan.for_rank(rank), ChannelSpec(kind, address, rank, size, channel_timeout_s)) for rank in range(size)]
    call_together(
        [(train, "prepare_refit", arguments[:offset]), (generation, "prepare_refit", arguments[offset:])],
        deadline=deadline,
    )
    return plan


class _HasSlices(Protocol):
    def weight_slices(self) -> Sequence[WeightSlice]: ...


def distinct_slices(group: WorkerGroup) -> list[Sequence[WeightSlice]]:
    """What each rank of the group holds. Replicas hold the same, which only the first of them sends."""
    digests: list[str] = group.call_function(slices_digest)
    senders = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    sent = group.call_function(slices_if, tuple(sorted(senders.values())))
    return [sent[senders[digest]] for digest in digests]


def slices_digest(worker: _HasSlices) -> str:
    """Equal for equal slices; runs in a worker."""
    import hashlib

    digest = hashlib.sha256()
    for one in worker.weight_slices():
        digest.update(f"{one.name} {one.box} {one.tensor} {one.local} {one.dtype} {one.scales}\n".encode())
    return digest.hexdigest()


def slices_if(worker: _HasSlices, ranks: tuple[int, ...]) -> list[WeightSlice]:
    """The slices of a worker whose rank is among `ranks`, nothing of the others; runs in a worker."""
    from dagrl.executors.node import state_of

    return list(worker.weight_slices()) if state_of(worker).rank in ranks else []


def device_of(worker: object) -> str:
    """The GPU that a worker holds its weights on, by its UUID; empty without one. Runs in the worker."""
    import torch

    tensors: Mapping[str, torch.Tensor] = getattr(worker, "weight_tensors", dict)()
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_devices(kind: ChannelKind, hosts: Sequence[int], devices: Sequence[str]) -> None:
    """Raise RefitPlanError for a channel that cannot join ranks on these hosts and GPUs (empty: on a CPU)."""
    if kind == "ipc" and len(set(hosts)) > 1:
        raise RefitPlanError(
            f"an ipc channel joins processes of one host, but the workers are on {len(set(hosts))}; place colocated workers "
            "on one host, or give train and generation workers GPUs of their own"
        )
    seen: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if kind == "nccl" and not device:
            raise RefitPlanError(
                f"an nccl channel joins GPUs, but rank {rank} of the refit has its weights on a CPU; use gloo"
            )
        if kind == "nccl" and device in seen:
            raise RefitPlanError(
                f"ranks {seen[device]} and {rank} of the refit share GPU {device}, which NCCL refuses; set "
                "policy.generation.colocated.enabled=true for an ipc channel, or give each worker a GPU of its own"
            )
        seen[device] = rank


def check_configs(train: Sequence[Mapping[str, Any]], generation: Sequence[Mapping[str, Any]]) -> None:
    """Every worker describes the same model. Raises RefitPlanError naming the keys that differ, and whose they are."""
    reference = train[0]
    workers = [
        *(("train", rank, one) for rank, one in enumerate(train)),
        *(("generation", n, one) for n, one in enumerate(generation)),
    ]
    for role, rank, config in workers:
        keys = sorted(key for key in {*reference, *config} if reference.get(key, _UNKNOWN) != config.get(key, _UNKNOWN))
        if keys:
            found = "; ".join(f"{key} is {_value(reference, key)} and {_value(config, key)}" for key in keys[:4])
            more = f" and {len(keys) - 4} more keys" if len(keys) > 4 else ""
            raise RefitPlanError(
                f"the model of train worker 0 and that of {role} worker {rank} differ: {found}{more}; give both the same "
                "model directory"
            )


def _check_same_model(train: WorkerGroup, generation: WorkerGroup) -> None:
    if all("weight_config" in group.role.methods for group in (train, generation)):
        check_configs(train.call("weight_config"), generation.call("weight_config"))


def _value(config: Mapping[str, Any], key: str) -> str:
    return repr(config[key]) if key in config else "missing"


def _hosts(train: WorkerGroup, generation: WorkerGroup) -> list[int]:
    """The host of each channel rank, as a number."""
    names = [place.host for group in (train, generation) for place in group.places]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
