"""Joins two worker groups for refits: asks both what they hold, plans once, opens the channel between them."""

from __future__ import annotations

import logging
from typing import Literal

from dagrl.channels.base import ChannelSpec
from dagrl.refit.plan import TIED_HEAD, RefitPlan, plan_refit
from dagrl.worker_group import WorkerGroup, call_together, free_address

logger = logging.getLogger(__name__)


def connect_refit(
    train: WorkerGroup,
    generation: WorkerGroup,
    *,
    dtype: str,
    tied_embeddings: bool,
    kind: Literal["gloo", "nccl"],
    timeout_s: float,
    channel_timeout_s: float,
) -> RefitPlan:
    """Plan the refit from `train` to `generation` and prepare every worker of both for it.

    `dtype` is that of the train weights. With `tied_embeddings` a generation head of its own is fed from the embedding.
    Channel ranks are the train ranks, then the generation ranks. Raises RefitPlanError before any channel is opened.
    """
    sources, destinations = train.call("weight_slices"), generation.call("weight_slices")
    plan = plan_refit(sources, destinations, dtype=dtype, aliases=TIED_HEAD if tied_embeddings else None)
    logger.debug("refit plan: %s", plan.summary())
    address = train.call_function(free_address, timeout_s=timeout_s)[0]
    offset = train.layout.world_size
    size = offset + generation.layout.world_size
    arguments = [(plan.for_rank(rank), ChannelSpec(kind, address, rank, size, channel_timeout_s)) for rank in range(size)]
    call_together(
        [(train, "prepare_refit", arguments[:offset]), (generation, "prepare_refit", arguments[offset:])],
        timeout_s=timeout_s,
    )
    return plan
