"""What each rank of an engine will hold, without starting one: vLLM builds its model, and its loader is recorded.

This takes some 20 seconds, in a process of its own, because vLLM keeps one rank and one platform per process. Size and rank
of tensor parallelism are set on vLLM's groups, which building and loading do not use. Weights are allocated on the host and
never touched, so they take no memory.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.config import Json
from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice, expand, full_shapes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def describe_ranks(hf_config: Mapping[str, Json], tp: int, arguments: Mapping[str, Any]) -> list[list[WeightSlice]]:
    """Returns the weights of each of `tp` ranks. `arguments` are vLLM's `EngineArgs`.

    Raises ConfigError, with vLLM's own words, for a model that vLLM cannot build or load in this way.
    """
    return _describe_ranks(
        json.dumps({"hf_config": dict(hf_config), "tp": tp, "arguments": dict(arguments)}, sort_keys=True)
    )


@lru_cache(maxsize=8)
def _describe_ranks(request: str) -> list[list[WeightSlice]]:
    with tempfile.TemporaryDirectory(prefix="dagrl-describe-") as directory:
        (Path(directory) / "request.json").write_text(request)
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, directory]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise ConfigError(
                "vLLM cannot build the model of this config.json, so there is no refit plan before an engine runs:\n"
                + "\n".join(done.stderr.strip().splitlines()[-8:])
            )
        ranks: list[list[WeightSlice]] = pickle.loads((Path(directory) / "slices").read_bytes())  # noqa: S301
        return ranks


def build(
    directory: Path, tp: int, rank: int, dtype: torch.dtype, device: torch.device | None = None, **arguments: Any
) -> tuple[torch.nn.Module, VllmConfig]:
    """Builds one rank's model for a checkpoint's configuration, without its weights. Returns it with vLLM's configuration.

    `device` is a GPU, or None for the CPU. `arguments` are vLLM's `EngineArgs`.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = {
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "enforce_eager": True,
        "max_model_len": 64,
        "enable_prefix_caching": False,
        **arguments,
    }
    config = EngineArgs(model=str(directory), **arguments).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        if not torch.distributed.is_initialized():
            store, (index, backend) = Path(tempfile.mkdtemp()) / "store", (device.index, "nccl") if device else (0, "gloo")
            parallel_state.init_distributed_environment(1, 0, f"file://{store}", index, backend)
        parallel_state.destroy_model_parallel()  # left by an earlier model; only models with experts have an expert group
        parallel_state.initialize_model_parallel(1, 1)
        as_rank(tp, rank)
        config.parallel_config.tensor_parallel_size = tp
        with device or nullcontext():
            model: torch.nn.Module = initialize_model(config)
    return model, config


def as_rank(tp: int, rank: int) -> None:
    """Makes vLLM take this process for one rank of `tp`, in what it builds and loads from now on."""
    from vllm.distributed import parallel_state

    for group in (parallel_state._TP, parallel_state._EP):
        if group is not None:  # vLLM makes the expert-parallel group for models with experts
            group.world_size, group.rank_in_group, group.ranks = tp, rank, list(range(tp))


def do_without_kernels() -> None:
    """Skips vLLM's checks for kernels that CPUs lack. They do not change what a model holds."""
    from unittest.mock import MagicMock

    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.quantization import fp8
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
    type(current_platform).supported_quantization = ["fp8"]
    fp8.init_fp8_linear_kernel = MagicMock()
    fp8.select_fp8_moe_backend = lambda *args, **options: (MagicMock(), None)


def main(directory: str) -> None:
    """Answers `request.json` in `directory` with the file `slices`."""
    import torch
    from transformers import AutoConfig

    from dagrl.refit.fp8 import SCALE_SUFFIX, scale_shape
    from dagrl.refit.recording import record
    from dagrl.refit.sources import slices_of
    from dagrl.run.model import auto_class
    from dagrl.workers.vllm.launch import import_vllm

    root = Path(directory)
    request = json.loads((root / "request.json").read_text())
    hf_config, arguments = request["hf_config"], request["arguments"]
    (root / "config.json").write_text(json.dumps({**hf_config, "quantization_config": None}))
    dtype: torch.dtype = getattr(torch, arguments.pop("dtype"))
    known = AutoConfig.from_pretrained(root, trust_remote_code=False)
    with torch.device("meta"):
        module = auto_class(known).from_config(known, dtype=dtype)
    hf_config = {"architectures": [type(module).__name__], **hf_config}
    (root / "config.json").write_text(json.dumps(hf_config))
    import_vllm(hf_config)
    do_without_kernels()
    shapes = full_shapes(expand(slices_of(module, dtype=str(dtype).removeprefix("torch."))))
    checkpoint = [(name, shape, dtype) for name, shape in shapes.items()]
    ranks = []
    for rank in range(request["tp"]):
        model, _ = build(root, request["tp"], rank, dtype, **arguments)
        recording = record(model, checkpoint, dtype)
        if recording.quantized:
            scales = [
                (f"{name}{SCALE_SUFFIX}", scale_shape(shape), torch.float32)
                for name, shape, _ in checkpoint
                if name in recording.quantized
            ]
            recording = record(model, [*checkpoint, *scales], dtype)
        ranks.append(recording.slices)
    (root / "slices").write_bytes(pickle.dumps(ranks))


if __name__ == "__main__":
    main(sys.argv[1])
