"""Process groups of any train worker: joining and leaving them, aborting collectives, and waiting for each other's files."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from dagrl.errors import CheckpointError
from dagrl.runtime.process_groups import break_groups, reset_group_names
from dagrl.runtime.store import open_tcp_store
from dagrl.runtime.worker import WorkerContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GC_PASSES = 5  # at most, until the garbage collector finds nothing

_dropping = threading.Lock()

Result = TypeVar("Result")


def join_group(context: WorkerContext, address: str) -> None:
    """Creates the default group with the other ranks at `address` (host:port of rank 0), with the context's deadline."""
    import torch
    import torch.distributed as dist

    size, timeout = context.layout.world_size, timedelta(seconds=context.collective_timeout_s)
    host, _, port = address.rpartition(":")
    store = open_tcp_store(host, int(port), size, serves=context.rank == 0, timeout=timeout)
    kind = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kind, store=store, rank=context.rank, world_size=size, timeout=timeout)


def destroy_groups() -> None:
    """Destroys the default group and all others, also after an abort or a failed join."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    reset_group_names()


def leave_group() -> None:
    """Destroys all groups, and collects what still holds them.

    Dropped models and optimizers are in reference cycles and hold groups, whose threads wake 100 times a second. Those of
    sharded optimizers need a second pass.
    """
    destroy_groups()
    for _ in range(GC_PASSES):
        if not gc.collect():
            break


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
