"""vLLM's models, built one rank after the other in this process. They are loaded and compared, and never run.

Size and rank of tensor parallelism are set on vLLM's groups, which building and loading do not use.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch


def as_rank(tp: int, rank: int) -> None:
    """Makes vLLM take this process for one rank of `tp`, in what it builds and loads from now on."""
    from vllm.distributed import parallel_state

    for group in (parallel_state._TP, parallel_state._EP):
        if group is not None:  # vLLM makes the expert-parallel group for models with experts
            group.world_size, group.rank_in_group, group.ranks = tp, rank, list(range(tp))


def build(directory: Path, tp: int, rank: int, dtype: torch.dtype, *, expert_parallel: bool = False) -> torch.nn.Module:
    """Returns one rank's model for a checkpoint's configuration, without its weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "enforce_eager": True,
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "enable_expert_parallel": expert_parallel,
    }
    config = EngineArgs(model=str(directory), **arguments).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        if not torch.distributed.is_initialized():
            store = Path(tempfile.mkdtemp()) / "store"
            parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        as_rank(tp, rank)
        config.parallel_config.tensor_parallel_size = tp
        model: torch.nn.Module = initialize_model(config)
    return model


def do_without_kernels() -> None:
    """Skips vLLM's checks for kernels that CPUs lack. They do not change what a model holds."""
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.platforms import current_platform
    from vllm.triton_utils import triton

    if not current_platform.is_cpu():
        return

    class Gpu:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "is_xpu" else getattr(current_platform, name)

    if not hasattr(triton, "set_allocator"):  # vLLM's placeholder
        triton.set_allocator = lambda allocate: None
    config.current_platform = Gpu()
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda moe_config: (UnquantizedMoeBackend.CPU, None)
    select = type(current_platform).get_attn_backend_cls

    def dense(_: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
        return select(selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    type(current_platform).get_attn_backend_cls = classmethod(dense)
