"""The workers of the baseline: ours, with the refit that is usual today added, a broadcast of whole Hugging Face tensors.

As NeMo-RL does it (`nemo_rl/utils/packed_tensor.py`, `broadcast_weights_for_collective` of its Megatron worker): every
tensor is gathered over the tensor-parallel workers and handed on to the other pipeline stages, put into Hugging Face form,
packed with others into a buffer of a fiftieth of the GPU's memory, and broadcast from train worker 0 to all generation
workers, which give it to vLLM's own `load_weights`. One buffer after the other: NeMo-RL packs one while it sends another.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError
from dagrl.executors.node import state_of
from dagrl.refit.slices import WeightSlice, expand
from workers.megatron.hf import local_view
from workers.megatron.worker import MegatronWorker
from workers.vllm.worker import VllmWorker

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PACKED_SHARE = 0.02
"""Of a GPU's memory, in one packed buffer (NeMo-RL's `NRL_REFIT_BUFFER_MEMORY_RATIO`)."""

PACKED_BYTES_ON_CPU = 64 << 20

Described = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of each Hugging Face tensor, in the order in which they come."""


class _Timed:
    """Workers whose calls say how long they ran, and that can leave the broadcast that they joined."""

    _broadcast: Any = None

    def timed(self, method: str, *args: object) -> tuple[float, Any]:
        """The seconds of a call, and its result; what runs is noted as a replay's nodes are, for a driver that waits."""
        started, state = time.perf_counter(), state_of(self)
        state.activity = ("plain Ray", 0, method, threading.get_ident(), time.monotonic())
        try:
            result = getattr(self, method)(*args)
        finally:
            state.activity = None
        return time.perf_counter() - started, result

    def leave_broadcast(self) -> None:
        """Close the process group; its threads and buffers would be there for whatever is measured next.

        Over NCCL this returns when all ranks of the group have been called.
        """
        if self._broadcast is not None:
            self._broadcast.shutdown()
            self._broadcast = None


class PlainMegatronWorker(_Timed, MegatronWorker):
    """A train worker that can broadcast its weights."""

    def join_broadcast(self, address: str, size: int) -> Described:
        """Agree with the other train workers on what is gathered, and (worker 0) join the broadcast; what will come."""
        import torch.distributed as dist

        if self.context.layout.ep > 1:
            raise ConfigError("the baseline's refit gathers dense models; expert_model_parallel_size must be 1")
        mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.weight_tensors().items()}
        gathered: list[Any] = [None] * self.context.layout.world_size
        dist.all_gather_object(gathered, mine)
        self._held: list[dict[str, Any]] = gathered
        self._stages = [self._held_by(stage) for stage in range(self.context.layout.pp)]
        if self.context.rank == 0:
            self._broadcast = _open_group(address, 0, size, self.context.collective_timeout_s, self._device)
        self._described = [(name, tuple(whole.shape), str(whole.dtype)) for name, whole in self._whole_tensors()]
        return self._described

    def broadcast_weights(self) -> int:
        """Gather everything, and (worker 0) broadcast it; the bytes."""
        import torch

        with self._running():
            tensors = (whole for _, whole in self._whole_tensors())
            for run in _runs(self._described, self._device):
                bucket = [tensor.view(torch.uint8).flatten() for tensor in islice(tensors, len(run))]
                if self.context.rank == 0:
                    self._broadcast.broadcast(torch.cat(bucket), 0).wait()
        return sum(map(_bytes, self._described))

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every Hugging Face tensor, once, on every worker."""
        seen, live = set(), self.weight_tensors()  # once: a walk over all modules
        for stage, (ranks, slices) in enumerate(self._stages):
            for name in slices[0]:
                pieces = [mine.get(name, []) for mine in slices]  # a rank may hold only padding of the vocabulary
                parts = self._parts(live, stage, ranks, name, pieces)
                for whole_name, whole in _assemble(parts, pieces).items():
                    if whole_name not in seen:  # a tied embedding is held by two stages
                        seen.add(whole_name)
                        yield whole_name, whole

    def _held_by(self, stage: int) -> tuple[list[int], list[dict[str, list[WeightSlice]]]]:
        """The ranks of a stage's first replica, and what each holds by local tensor: described once, not in every refit."""
        ranks = [rank for rank in range(self.context.layout.world_size) if self._in_first_replica(rank, stage)]
        return ranks, [_by_tensor(self._slices_of(rank)) for rank in ranks]

    def _in_first_replica(self, rank: int, stage: int) -> bool:
        where = self.context.layout.coordinates(rank)
        return where.pp == stage and where.dp == 0 and where.cp == 0

    def _parts(
        self,
        live: Mapping[str, Tensor],
        stage: int,
        ranks: Sequence[int],
        name: str,
        slices: Sequence[Sequence[WeightSlice]],
    ) -> list[Tensor]:
        """The local tensor of each tensor-parallel worker of a stage (of one, where all hold the same), on every worker."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state

        shape, dtype = self._held[ranks[0]][name]
        cut = len(ranks) > 1 and [piece.box for piece in slices[0]] != [piece.box for piece in slices[1]]
        parts = [torch.empty(shape, dtype=dtype, device=self._device) for _ in (ranks if cut else ranks[:1])]
        if self.context.coordinates.pp == stage:
            local = live[name].contiguous()
            if cut:
                dist.all_gather(parts, local, group=parallel_state.get_tensor_model_parallel_group())
            else:
                parts = [local]
        if self.context.layout.pp > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            for part in parts:
                dist.broadcast(part, dist.get_global_rank(group, stage), group=group)
        return parts


class PlainVllmWorker(_Timed, VllmWorker):
    """A generation worker that takes a broadcast."""

    def join_broadcast(self, address: str, size: int) -> None:
        """Join the broadcast as the rank after train worker 0."""
        self._enter_device()
        rank = 1 + self.context.rank
        self._broadcast = _open_group(address, rank, size, self.context.collective_timeout_s, self._device)

    def receive_broadcast(self, version: int, described: Described) -> None:
        """Receive all tensors and load them as `version`."""
        import torch

        with self.writing_weights(version):
            for run in _runs(described, self._device):
                packed = torch.empty(sum(map(_bytes, run)), dtype=torch.uint8, device=self._device)
                self._broadcast.broadcast(packed, 0).wait()
                self._load(_unpack(packed, run))

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        if self._device.type == "cuda":
            assert self._llm is not None
            self._llm.collective_rpc(_load_weights, args=(list(tensors.items()),))
            return
        for piece in expand(self._slices):  # vLLM's CPU backend has no parameters left to load into
            if piece.name in tensors:
                part = tensors[piece.name][tuple(slice(start, stop) for start, stop in piece.box)]
                local_view(self.weight_tensors()[piece.tensor], piece).copy_(part)


def _load_weights(worker: Any, tensors: list[tuple[str, Tensor]]) -> None:
    worker.model_runner.model.load_weights(weights=tensors)


def _open_group(address: str, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
    """A process group beside the default one."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = address.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, int(port), size, rank == 0, timeout)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _packed_bytes(device: torch.device) -> int:
    import torch

    if device.type == "cpu":
        return PACKED_BYTES_ON_CPU
    return int(torch.cuda.get_device_properties(device).total_memory * PACKED_SHARE)


def _by_tensor(slices: Sequence[WeightSlice]) -> dict[str, list[WeightSlice]]:
    found: dict[str, list[WeightSlice]] = {}
    for piece in expand(slices):
        found.setdefault(piece.tensor, []).append(piece)
    return found


def _assemble(parts: Sequence[Tensor], slices: Sequence[Sequence[WeightSlice]]) -> dict[str, Tensor]:
    """The Hugging Face tensors that lie in one tensor of a stage."""
    import torch

    used = list(zip(parts, slices, strict=False))  # one part where all hold the same
    shapes: dict[str, list[int]] = {}
    for _, pieces in used:
        for piece in pieces:
            ends = [stop for _, stop in piece.box]
            shapes[piece.name] = [max(pair) for pair in zip(ends, shapes.get(piece.name, ends), strict=True)]
    wholes = {name: torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device) for name, shape in shapes.items()}
    for part, pieces in used:
        for piece in pieces:
            box = tuple(slice(start, stop) for start, stop in piece.box)
            wholes[piece.name][box].copy_(local_view(part, piece))
    return wholes


def _runs(described: Described, device: torch.device) -> Iterator[Described]:
    """What goes together: tensors until one reaches the size of a packed buffer."""
    run: Described = []
    limit, size = _packed_bytes(device), 0
    for item in described:
        run.append(item)
        size += _bytes(item)
        if size >= limit:
            yield run
            run, size = [], 0
    if run:
        yield run


def _bytes(item: tuple[str, tuple[int, ...], str]) -> int:
    return math.prod(item[1]) * _dtype(item[2]).itemsize


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _unpack(packed: Tensor, run: Described) -> dict[str, Tensor]:
    import torch

    parts = torch.split(packed, [_bytes(item) for item in run])
    return {name: part.view(_dtype(dtype)).view(shape) for (name, shape, dtype), part in zip(run, parts, strict=True)}
