"""Test doubles with the exact signatures of NeMo-RL's classes, whose main needs Python 3.13.14, and its own if importable.

Signatures and meaning: NVIDIA-NeMo/RL, `nemo_rl/distributed/{worker_groups,named_sharding,batched_data_dict}.py` at 7ea279a.
Tests run against both: `PYTHONPATH=<a checkout of NVIDIA-NeMo/RL> pytest tests/integration/test_embed_nemo_rl.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import UserDict
from typing import Any

import numpy as np
import ray

TRAIN_AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


class NotingWorker:
    """Remembers what was called. Needs no torch, whose import takes longer than a process of Ray."""

    def __init__(self) -> None:
        self.history: list[str] = []

    def note(self, text: str, seconds: float = 0.0) -> str:
        time.sleep(seconds)
        self.history.append(text)
        return text

    def refuse(self, *, data: Any) -> None:
        raise ValueError(f"told to refuse {data}")

    def later(self, *, text: str) -> str:
        return self.note(text, 0.02)

    def done(self) -> list[str]:
        done, self.history = self.history, []
        return done


class AsyncNotingWorker(NotingWorker):
    """Ray runs its methods on an event loop."""

    async def prepare_for_generation(self, *, tags: str) -> str:
        await asyncio.sleep(0.001)
        self.history.append(tags)
        return threading.current_thread().name


class NamedSharding:
    """Ranks in an array with named axes."""

    def __init__(self, layout: Any, names: list[str]) -> None:
        self._layout = np.array(layout)
        self.names = list(names)

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.names, self._layout.shape, strict=True))

    @property
    def size(self) -> int:
        return self._layout.size

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        return dict(zip(self.names, map(int, np.argwhere(self._layout == worker_id)[0]), strict=True))

    def get_axis_size(self, name: str) -> int:
        return self.shape[name]


class BatchedDataDict(UserDict):  # type: ignore[type-arg]
    def shard_by_batch_size(self, shards: int, batch_size: int | None = None, **_: Any) -> list[BatchedDataDict]:
        cut = {name: tensor.chunk(shards) for name, tensor in self.items()}
        return [BatchedDataDict({name: parts[shard] for name, parts in cut.items()}) for shard in range(shards)]

    @classmethod
    def from_batches(cls, batches: Any, pad_value_dict: dict[str, float] | None = None) -> BatchedDataDict:
        import torch

        return cls({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})


class MultiWorkerFuture:
    """References of the workers that were called, and whose results count."""

    def __init__(
        self, futures: list[Any], return_from_workers: list[int] | None = None, called_workers: list[int] | None = None
    ) -> None:
        self.futures, self.return_from_workers, self.called_workers = futures, return_from_workers, called_workers

    def get_results(self, worker_group: Any, return_generators_as_proxies: bool = False) -> list[Any]:
        found = dict(zip(self.called_workers or itertools.count(), ray.get(self.futures), strict=False))
        return [found[worker] for worker in self.return_from_workers or found if worker in found]


class RayWorkerGroup:
    """The calls of `RayWorkerGroup`, with its signatures."""

    def __init__(self, workers: list[Any], sharding_annotations: Any, name_prefix: str = "") -> None:
        self._workers = workers
        self.sharding_annotations = sharding_annotations
        self.name_prefix = name_prefix

    @property
    def workers(self) -> list[Any]:
        return self._workers

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any) -> Any:
        assert not args
        return getattr(self.workers[worker_idx], method_name).remote(**kwargs)

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: list[str] | None = None,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        assert not args and kwargs
        called = self._called(run_rank_0_only_axes)
        return [
            getattr(self.workers[worker], method_name).remote(
                **{key: values[at] for key, values in kwargs.items()}, **(common_kwargs or {})
            )
            for at, worker in enumerate(called)
        ]

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: list[str] | None = None, **kwargs: Any
    ) -> list[Any]:
        assert not args
        kwargs = {key: ray.put(value) for key, value in kwargs.items()}
        called = self._called(run_rank_0_only_axes)
        return [getattr(self.workers[worker], method_name).remote(**kwargs) for worker in called]

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: list[str] | None = None,
        replicate_on_axes: list[str] | None = None,
        output_is_replicated: list[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        assert not args
        sharded, replicated = in_sharded_axes or [], replicate_on_axes or []
        for axis in sharded + replicated:
            if axis not in self.sharding_annotations.names:
                raise ValueError(f"Axis '{axis}' not found in sharding annotations")
        futures, called, returned = [], [], []
        for worker, actor in enumerate(self._workers):
            at = self.sharding_annotations.get_worker_coords(worker)
            free = [axis for axis in at if axis not in sharded + replicated and at[axis]]
            if not free and not any(at[axis] for axis in output_is_replicated or []):
                returned.append(worker)
            if free and not make_dummy_calls_to_free_axes:
                continue
            mine = dict.fromkeys(kwargs) if free else {key: _slice(value, sharded, at) for key, value in kwargs.items()}
            futures.append(getattr(actor, method_name).remote(**mine, **(common_kwargs or {})))
            called.append(worker)
        return MultiWorkerFuture(futures=futures, called_workers=called, return_from_workers=returned)

    def get_all_worker_results(self, future_bundle: MultiWorkerFuture, return_generators_as_proxies: bool = False) -> Any:
        return future_bundle.get_results(self, return_generators_as_proxies=return_generators_as_proxies)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        return True

    def _called(self, run_rank_0_only_axes: list[str] | None) -> list[int]:
        coords = [self.sharding_annotations.get_worker_coords(worker) for worker in range(len(self.workers))]
        return [worker for worker, at in enumerate(coords) if not any(at.get(axis) for axis in run_rank_0_only_axes or [])]


def _slice(value: Any, axes: list[str], at: dict[str, int]) -> Any:
    for axis in axes:
        value = value[at[axis]]
    return value


def real_group(workers: list[Any], sharding: Any, name_prefix: str = "") -> Any:
    """NeMo-RL's own `RayWorkerGroup` over actors that exist. Its constructor would make them in a GPU cluster."""
    from nemo_rl.distributed.worker_groups import RayWorkerGroup as Real

    group = Real.__new__(Real)
    group._workers, group._worker_metadata = list(workers), [{}] * len(workers)
    group.sharding_annotations, group.name_prefix = sharding, name_prefix
    return group
