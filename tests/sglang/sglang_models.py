"""SGLang's models, built for one rank after the other in this process. They are loaded and compared, and never run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch

from dagrl.workers.sglang import RECEIVE


def start(directory: Path) -> None:
    """Makes this process an SGLang engine of one rank for a checkpoint's configuration."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(directory), device="cpu", dtype="bfloat16", skip_tokenizer_init=True)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(arguments)


def build(directory: Path) -> torch.nn.Module:
    """Returns the model of the rank that SGLang's context says, without its weights."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    config = ModelConfig(str(directory), dtype="bfloat16")
    with set_default_torch_dtype(torch.bfloat16):
        return _initialize_model(config, LoadConfig())


@contextmanager
def as_rank(tp: int, rank: int) -> Iterator[None]:
    """Makes SGLang take this process for one rank of `tp`, in what it builds and loads in the block."""
    from sglang.srt.runtime_context import get_parallel

    parallel, fields = get_parallel(), dict[str, Any]()
    for axis in ("tp", "attn_tp", "moe_tp"):
        group = fields[f"{axis}_group"] = copy(getattr(parallel, f"{axis}_group"))
        group.world_size, group.rank_in_group, group.ranks = tp, rank, list(range(tp))
        fields |= {f"{axis}_size": tp, f"{axis}_rank": rank}
    with parallel.override(**fields):
        yield


def weight_updater(model: torch.nn.Module, rank: int) -> Any:
    """Returns the part of SGLang's model runner that updates weights."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    unused = dict.fromkeys(("model_config", "update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    loaders = {"custom_weight_loaders": [RECEIVE], "get_model": lambda: model}
    return WeightUpdater(tp_rank=rank, device="cpu", gpu_id=0, **loaders, **unused)
