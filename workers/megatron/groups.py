"""Process groups of a train worker: the default group, Megatron's model parallel groups, and their end."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dagrl.layout import ParallelLayout
from dagrl.process_groups import break_groups, name_groups_anew
from dagrl.worker import WorkerContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PASSES = 5  # of the garbage collector at most, until it finds nothing
_dropping = threading.Lock()


def start_groups(context: WorkerContext, address: str, seed: int) -> None:
    """Meet the others at `address` (host:port of rank 0) and make Megatron's groups, all with the context's deadline."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layout, timeout = context.layout, timedelta(seconds=context.collective_timeout_s)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{address}",
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
    """A layout's sizes, as both Megatron's `initialize_model_parallel` and its `TransformerConfig` call them."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def start_checkpoint_group(checkpoint_s: float) -> ProcessGroup:
    """One more group of all workers, over Gloo, in which they wait while others write or read files; a collective.

    Its deadline is half as long again as what a worker waits for its own files, so that a late one says so first.
    """
    import torch.distributed as dist

    group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5 * checkpoint_s))
    return group


def abort_groups() -> None:
    """Break every group of this process, from any thread: what waits in a collective here or at a peer raises.

    Over NCCL, do so as well where a peer died; the process can then say what happened, but is not fit to join new groups.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    over_nccl = dist.get_backend() == "nccl"
    if not break_groups(list(dist.distributed_c10d._world.pg_map)) or not over_nccl:
        return
    with _dropping:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()  # nothing is left to abort: it drops their names


def end_groups() -> None:
    """Destroy Megatron's groups and the default one; what an abort, or a join that failed, left of them as well.

    Models and optimizers that were dropped lie in reference cycles and hold groups, each with threads that wake 100 times a
    second; they are collected here. Those of sharded optimizers were seen to be found by the second pass alone.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # after an abort over NCCL the default group is gone, and Megatron's are not
    if dist.is_initialized():
        dist.destroy_process_group()
    name_groups_anew()
    for _ in range(_PASSES):
        if not gc.collect():
            break
