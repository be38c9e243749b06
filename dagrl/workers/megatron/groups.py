"""Megatron's process groups: creation and destruction."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.process_groups import reset_group_names
from dagrl.runtime.store import open_tcp_store
from dagrl.runtime.worker import WorkerContext

_GC_PASSES = 5  # at most, until the garbage collector finds nothing


def start_groups(context: WorkerContext, address: str, seed: int) -> None:
    """Joins the other ranks at `address` (host:port of rank 0) and creates Megatron's groups with the context's deadline."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    layout, timeout = context.layout, timedelta(seconds=context.collective_timeout_s)
    host, _, port = address.rpartition(":")
    store = open_tcp_store(host, int(port), layout.world_size, serves=context.rank == 0, timeout=timeout)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=context.rank,
        world_size=layout.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        **parallel_sizes(layout),
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    # Layers have no dropout, so they need no random generators of their own, and do not fork any.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def parallel_sizes(layout: ParallelLayout) -> dict[str, Any]:
    """Returns a layout's sizes under the names of Megatron's `initialize_model_parallel` and `TransformerConfig`."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def end_groups() -> None:
    """Destroys Megatron's groups and the default group, also after an abort or a failed join.

    Dropped models and optimizers are in reference cycles and hold groups, whose threads wake 100 times a second. They are
    collected here. Those of sharded optimizers need a second pass.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # after an NCCL abort the default group is gone, but not Megatron's
    if dist.is_initialized():
        dist.destroy_process_group()
    reset_group_names()
    for _ in range(_GC_PASSES):
        if not gc.collect():
            break
