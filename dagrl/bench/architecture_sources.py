"""What trainers hold of a tiny model, for `refit_architectures.py`: a plain module, FSDP2 shards, Megatron's modules.

Shards are made in forked processes, each of which is one rank of a world without peers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dagrl.bench.forked import run_forked
from dagrl.bench.tiny_configs import tiny_model
from dagrl.refit import WeightSlice
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.workers.families.decoder import MODEL_TYPES

SHARDS = 2

Part = tuple[list[WeightSlice], Mapping[str, torch.Tensor]]
"""What one rank of the source holds."""


def megatron_trains(directory: Path) -> bool:
    """Whether dagrl's Megatron worker trains models with the checkpoint's configuration."""
    return json.loads((directory / "config.json").read_text())["model_type"] in MODEL_TYPES


def whole(name: str, directory: Path) -> list[Part]:
    """Returns the parts of a plain module."""
    model = tiny_model(name, seed=1)
    return [(slices_of(model, dtype="bfloat16"), tensors_of(model, dtype="bfloat16"))]


def _sharded(write: Callable[..., None], name: str, directory: Path) -> list[Part]:
    parts = []
    for rank in range(SHARDS):
        path = directory / f"{write.__name__}{rank}.pt"
        if reason := run_forked(write, (name, directory, path, rank)):
            raise RuntimeError(reason)
        parts.append(torch.load(path, weights_only=False))
    return parts


def _join_world(rank: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=SHARDS, store=FakeStore())


def _write_fsdp_shard(name: str, directory: Path, path: Path, rank: int) -> None:
    _join_world(rank)
    model = tiny_model(name, seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (SHARDS,)))
    torch.save((slices_of(model, dtype="bfloat16"), dict(tensors_of(model, dtype="bfloat16"))), path)


def _write_megatron_shard(name: str, directory: Path, path: Path, rank: int) -> None:
    from megatron.core import parallel_state

    from dagrl.config import PolicyConfig
    from dagrl.runtime.layout import ParallelLayout
    from dagrl.workers.megatron import cpu
    from dagrl.workers.megatron.architecture import read_architecture
    from dagrl.workers.megatron.groups import parallel_sizes
    from dagrl.workers.megatron.model import build_model
    from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
    from dagrl.workers.train.hf_load import load_hf, read_hf_config

    cpu.adapt()
    _join_world(rank)
    layout = ParallelLayout(tp=SHARDS)
    parallel_state.initialize_model_parallel(**parallel_sizes(layout), create_gloo_process_groups=False)
    config: dict[str, Any] = read_hf_config(directory)
    policy = PolicyConfig(model_name=name, precision="bfloat16")
    tensors = build_model(read_architecture(config), policy, layout, torch.device("cpu")).tensors()
    slices = megatron_weight_slices(config, layout, rank)
    load_hf(directory, slices, parameter_shapes(config), tensors)
    torch.save((slices, {key: tensor.clone() for key, tensor in tensors.items()}), path)


SOURCES: Mapping[str, Callable[[str, Path], list[Part]]] = {
    "hf": whole,
    "dtensor": partial(_sharded, _write_fsdp_shard),
    "megatron": partial(_sharded, _write_megatron_shard),
}
"""What makes the parts of a model from its name and the directory of its checkpoint: a plain module, its FSDP2 shards, or
Megatron's modules at TP2."""
