"""Workers with each of verl's dispatch modes, and groups of them in each of the three ways that verl colocates roles."""

from __future__ import annotations

from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls, create_colocated_worker_raw_cls
from verl.utils import tensordict_utils as tu

WORKERS = 4


def _of_somebody(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


class Actor(Worker):
    """Ranks 2r and 2r + 1 are one data-parallel rank of the mesh `pairs`, of which the first one's results are kept.

    In the mesh `ranks` each is one.
    """

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.scale = scale
        self.calls: list[str] = []
        self._register_dispatch_collect_info("pairs", self.rank // 2, self.rank % 2 == 0)
        self._register_dispatch_collect_info("ranks", self.rank, True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, value: Any, *, add: int = 0) -> Any:
        self.calls.append("one_to_all")
        return value * self.scale + self.rank + add

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, value: int) -> int:
        return value * 10 + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, value: int) -> int:
        return value * 100 + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dp_compute_proto(self, data: DataProto) -> DataProto:
        data.batch["x"] = data.batch["x"] * self.scale + self.rank
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        self.calls.append("later")
        return self.dp_compute_proto(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> dict[str, Any]:
        return {"rank": self.rank, "sum": data.batch["x"].sum().item()}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="pairs"))
    def over_mesh(self, data: TensorDict, *, other: TensorDict | None = None) -> TensorDict:
        y = data["x"] * 2 + self.rank + (0 if other is None else other["x"])
        named = {"name": tu.get(data, "name"), "words": tu.get(data, "words")}
        return tu.get_tensordict({"x": data["x"], "y": y, "ids": data["ids"]}, named)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="pairs"), blocking=False)
    def over_mesh_later(self, data: TensorDict) -> TensorDict:
        return self.over_mesh(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ranks"))
    def over_ranks(self, data: TensorDict) -> TensorDict:
        return tu.get_tensordict({"y": data["x"] * 2 + self.rank}, {"name": tu.get(data, "name")})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, value: Any) -> Any:
        return value, self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def awaited(self, data: DataProto) -> DataProto:
        data.batch["x"] -= self.rank
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, value: int) -> None:
        raise ValueError(f"rank {self.rank} was told to fail with {value}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def references(self, value: int) -> int:
        self.calls.append("references")
        return value + self.rank

    @register(dispatch_mode={"dispatch_fn": _of_somebody, "collect_fn": _of_somebody})
    def own_mode(self, value: int) -> int:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def history(self) -> list[str]:
        return self.calls


class Critic(Worker):
    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dp_compute_proto(self, data: DataProto) -> DataProto:
        data.batch["x"] = data.batch["x"] - self.offset
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, value: Any) -> Any:
        return value - self.offset


def _pool() -> RayResourcePool:
    return RayResourcePool([WORKERS], use_gpu=False)


def plain() -> dict[str, Any]:
    actor = RayClassWithInitArgs(ray.remote(Actor), scale=3)
    return {"actor": RayWorkerGroup(_pool(), actor, device_name="cpu")}


def colocated() -> dict[str, Any]:
    roles = {
        "actor": RayClassWithInitArgs(ray.remote(Actor), scale=3),
        "critic": RayClassWithInitArgs(ray.remote(Critic), offset=7),
    }
    whole = RayWorkerGroup(_pool(), create_colocated_worker_cls(roles), device_name="cpu")
    groups: dict[str, Any] = whole.spawn(prefix_set=roles.keys())
    return groups


def fused() -> dict[str, Any]:
    roles = {
        "actor": RayClassWithInitArgs(ray.remote(Actor), scale=3),
        "critic": RayClassWithInitArgs(ray.remote(Critic), offset=7),
    }
    made = RayClassWithInitArgs(ray.remote(create_colocated_worker_raw_cls(roles)))
    made.fused_worker_used = True
    groups: dict[str, Any] = RayWorkerGroup(_pool(), made, device_name="cpu").spawn(prefix_set=roles.keys())
    return groups


def proto(rows: int = 8, auto_padding: bool = False) -> DataProto:
    x = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    return DataProto.from_single_dict({"x": x}, meta_info={"temperature": 0.5}, auto_padding=auto_padding)


def tensor_dict(rows: int = 8) -> TensorDict:
    ids = torch.nested.as_nested_tensor([torch.arange(row + 1) for row in range(rows)], layout=torch.jagged)
    tensors = {"x": torch.arange(rows, dtype=torch.float32), "ids": ids}
    return tu.get_tensordict(tensors, {"name": "batch", "words": [f"w{row}" for row in range(rows)]})
