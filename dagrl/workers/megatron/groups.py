"""Process groups of a train worker: creation, abort and destruction, and actions that all ranks run together."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from dagrl.errors import CheckpointError
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.process_groups import break_groups, reset_group_names
from dagrl.runtime.store import open_tcp_store
from dagrl.runtime.worker import WorkerContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GC_PASSES = 5  # at most, until the garbage collector finds nothing
_dropping = threading.Lock()

Result = TypeVar("Result")


def start_groups(context: WorkerContext, address: str, seed: int) -> None:
    """Meets the other ranks at `address` (host:port of rank 0) and creates Megatron's groups with the context's deadline."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

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
    model_parallel_cuda_manual_seed(seed, force_reset_rng=torch.cuda.is_available())


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


def start_checkpoint_group(checkpoint_s: float) -> ProcessGroup:
    """Creates a Gloo group of all workers, in which they wait while others write or read files. A collective.

    Its deadline is 1.5 times a worker's own file deadline, so that a late worker reports itself first.
    """
    import torch.distributed as dist

    group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5 * checkpoint_s))
    return group


def abort_groups() -> None:
    """Aborts every group of this process, so that waiting collectives raise here and at peers. Works from any thread.

    With NCCL this is also needed after a peer's death. The process can then report, but cannot join new groups.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    over_nccl = dist.get_backend() == "nccl"
    if not break_groups(list(dist.distributed_c10d._world.pg_map)) or not over_nccl:
        return
    with _dropping:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()  # groups are already aborted: this drops their names


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


def run_on_all_ranks(group: ProcessGroup | None, action: Callable[..., Result], *args: Any) -> Result:
    """Runs `action` on every rank of `group`. If it fails on one, raises CheckpointError with its message on all.

    Without a group, runs it in this process only and raises its error unchanged.
    """
    if group is None:
        return action(*args)
    error: Exception | None = None
    try:
        result = action(*args)
    except Exception as raised:
        error = raised
    failed = [message for message in gather_objects(group, None if error is None else str(error)) if message is not None]
    if failed:
        raise CheckpointError(failed[0]) from error
    return result


def gather_objects(group: ProcessGroup, value: Any) -> list[Any]:
    """Returns the values of all ranks, in rank order."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group)
    return gathered
