"""DTensors on real device meshes are described as they are held."""

from __future__ import annotations

import random
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.refit.test_sources import Holder, check_held

RANKS = 4


def run_rank(rank: int, store: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    check_placements(seed=0)
    check_fsdp_with_tensor_parallel()
    dist.destroy_process_group()


def check_placements(seed: int) -> None:
    """Random shapes, most of them uneven, in random placements on meshes of one and two dimensions."""
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    draw = random.Random(seed)  # noqa: S311
    meshes = [DeviceMesh("cpu", torch.arange(RANKS)), DeviceMesh("cpu", torch.arange(RANKS).view(2, 2))]
    for number in range(30):
        mesh = draw.choice(meshes)
        shape = tuple(draw.choice([1, 3, 4, 5, 8, 13]) for _ in range(draw.randint(1, 3)))
        placements = [draw.choice([Replicate(), Shard(draw.randrange(len(shape)))]) for _ in range(mesh.ndim)]
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        placed = distribute_tensor(whole, mesh, placements)
        strided = mesh.ndim == 2 and placements == [Shard(0), Shard(0)] and shape[0] % 4 == 0
        if strided:
            placed = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2), Shard(0)])
        assert torch.equal(placed.full_tensor(), whole)
        held = check_held(Holder(weight=placed), {"weight": whole})["weight"]
        copies = torch.prod(torch.tensor([mesh.size(i) for i, p in enumerate(placed.placements) if p.is_replicate()]))
        dist.all_reduce(held)
        assert (held == copies).all(), (number, shape, placements)


def check_fsdp_with_tensor_parallel() -> None:
    """FSDP2 over tensor parallelism, with rows that neither divides."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import _StridedShard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    up, down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
    model = nn.Sequential(OrderedDict(up=up, down=down, norm=nn.LayerNorm(7)))
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    placements = [p for tensor in model.state_dict().values() for p in tensor.placements]  # type: ignore[union-attr]
    assert any(isinstance(placement, _StridedShard) for placement in placements)
    for name, held in check_held(model, whole).items():
        dist.all_reduce(held)
        assert (held == (2 if name.startswith("norm") else 1)).all(), name


@pytest.mark.slow  # test_fsdp_lora.py has DTensors of two ranks too
def test_dtensors_on_real_meshes(tmp_path: Path) -> None:
    import torch.multiprocessing as mp

    mp.get_context("forkserver").set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel"])
    mp.start_processes(run_rank, (str(tmp_path / "store"),), RANKS, start_method="forkserver")  # type: ignore[no-untyped-call]
