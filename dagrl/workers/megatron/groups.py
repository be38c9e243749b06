"""Megatron's process groups: creation and destruction."""

from typing import Any

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.train.groups import join_group, leave_group


def start_groups(context: WorkerContext, address: str, seed: int) -> None:
    """Joins the other ranks at `address` (host:port of rank 0) and creates Megatron's groups with the context's deadline."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    join_group(context, address)
    parallel_state.initialize_model_parallel(
        **parallel_sizes(context.layout),
        distributed_timeout_minutes=context.collective_timeout_s / 60,
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
    """Destroys Megatron's groups and the default group, also after an abort or a failed join."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # after an NCCL abort the default group is gone, but not Megatron's
    leave_group()
