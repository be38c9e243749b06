"""Joins two worker groups for refits: asks both what they hold, plans once, opens the channel between them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dagrl.channels.base import ChannelSpec
from dagrl.errors import RefitPlanError
from dagrl.refit.plan import TIED_HEAD, RefitPlan, plan_refit
from dagrl.worker_group import WorkerGroup, call_together, free_address

logger = logging.getLogger(__name__)

_UNKNOWN = object()


def connect_refit(
    train: WorkerGroup,
    generation: WorkerGroup,
    *,
    dtype: str,
    tied_embeddings: bool,
    kind: Literal["gloo", "nccl", "ipc"],
    timeout_s: float,
    channel_timeout_s: float,
    bucket_bytes: int | None = None,
    replicate_in_host: bool = True,
) -> RefitPlan:
    """Plan the refit from `train` to `generation` and prepare every worker of both for it.

    `dtype` is that of the train weights. With `tied_embeddings` a generation head of its own is fed from the embedding.
    Channel ranks are the train ranks, then the generation ranks. Workers that have `weight_config()` are asked for it: the
    keys of the model's configuration that decide what they hold. Raises RefitPlanError before any channel is opened.
    """
    _check_same_model(train, generation)
    plan = plan_refit(
        train.call("weight_slices"),
        generation.call("weight_slices"),
        dtype=dtype,
        aliases=TIED_HEAD if tied_embeddings else None,
        bucket_bytes=bucket_bytes,
        hosts=_hosts(train, generation),
        replicate_in_host=replicate_in_host,
    )
    logger.debug("refit plan: %s", plan.summary())
    address = train.call_function(free_address, timeout_s=timeout_s)[0]
    offset, size = train.layout.world_size, plan.size
    arguments = [(plan.for_rank(rank), ChannelSpec(kind, address, rank, size, channel_timeout_s)) for rank in range(size)]
    call_together(
        [(train, "prepare_refit", arguments[:offset]), (generation, "prepare_refit", arguments[offset:])],
        timeout_s=timeout_s,
    )
    return plan


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
