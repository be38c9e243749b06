"""The baseline's workers: dagrl's, plus the usual refit, a broadcast of whole Hugging Face tensors.

This follows NeMo-RL (`nemo_rl/utils/packed_tensor.py`, `broadcast_weights_for_collective` of its Megatron worker). Every
tensor is gathered over the tensor-parallel workers, passed on to the other pipeline stages and converted to Hugging Face
form. It is packed with others into a buffer of a fiftieth of the GPU's memory and broadcast from train worker 0 to all
generation workers, which pass it to vLLM's own `load_weights`. Buffers follow one another; NeMo-RL packs one while it sends
another.
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
from dagrl.refit.slices import WeightSlice, expand
from dagrl.runtime.executors.node import state_of
from dagrl.workers.megatron.hf_load import local_view
from dagrl.workers.megatron.worker import MegatronWorker
from dagrl.workers.vllm.worker import VllmWorker

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PACKED_SHARE = 0.02
"""Share of a GPU's memory in one packed buffer (NeMo-RL's `NRL_REFIT_BUFFER_MEMORY_RATIO`)."""

PACKED_BYTES_ON_CPU = 64 << 20

Described = list[tuple[str, tuple[int, ...], "torch.dtype"]]
"""Name, shape and dtype of each Hugging Face tensor, in the order of the broadcast."""


class _Timed:
    """Workers that time their calls and can leave the broadcast they joined."""

    _broadcast: Any = None

    def timed(self, method: str, *args: object) -> tuple[float, Any]:
        """Returns a call's seconds and its result. Records the call like a replay's node, so that a waiting driver can
        report it."""
        started, state = time.perf_counter(), state_of(self)
        state.activity = (next(iter(state.members)), "plain Ray", 0, method, threading.get_ident(), time.monotonic())
        try:
            result = getattr(self, method)(*args)
        finally:
            state.activity = None
        return time.perf_counter() - started, result

    def leave_broadcast(self) -> None:
        """Closes the process group, whose threads and buffers would disturb the next measurement.

        Over NCCL this returns once all ranks of the group have called it.
        """
        if self._broadcast is not None:
            self._broadcast.shutdown()
            self._broadcast = None


class PlainMegatronWorker(_Timed, MegatronWorker):
    """A train worker that can broadcast its weights."""

    def join_broadcast(self, address: str, size: int) -> Described:
        """Agrees with the other train workers on what to gather; worker 0 joins the broadcast. Returns the tensors to
        expect."""
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
        self._described = [(name, tuple(whole.shape), whole.dtype) for name, whole in self._whole_tensors()]
        return self._described

    def broadcast_weights(self) -> int:
        """Gathers all tensors; worker 0 broadcasts them. Returns the bytes."""
        import torch

        with self._running():
            tensors = (whole for _, whole in self._whole_tensors())
            for run in _runs(self._described, self._device):
                bucket = [tensor.view(torch.uint8).flatten() for tensor in islice(tensors, len(run))]
                if self.context.rank == 0:
                    self._broadcast.broadcast(torch.cat(bucket), 0).wait()
        return sum(map(_bytes, self._described))

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every Hugging Face tensor once, on every worker."""
        seen, live = set(), self.weight_tensors()  # called once: it walks over all modules
        for stage, (ranks, slices) in enumerate(self._stages):
            for name in slices[0]:
                held = [mine.get(name, []) for mine in slices]  # a rank may hold only vocabulary padding
                parts = self._parts(live, stage, ranks, name, held)
                for whole_name, whole in _assemble(parts, held).items():
                    if whole_name not in seen:  # two stages hold a tied embedding
                        seen.add(whole_name)
                        yield whole_name, whole

    def _held_by(self, stage: int) -> tuple[list[int], list[dict[str, list[WeightSlice]]]]:
        """Returns the ranks of a stage's first replica and their slices by local tensor. Computed once, not per refit."""
        places = enumerate(map(self.context.layout.coordinates, range(self.context.layout.world_size)))
        ranks = [rank for rank, where in places if (where.pp, where.dp, where.cp) == (stage, 0, 0)]
        return ranks, [_by_tensor(self._slices_of(rank)) for rank in ranks]

    def _parts(
        self,
        live: Mapping[str, Tensor],
        stage: int,
        ranks: Sequence[int],
        name: str,
        slices: Sequence[Sequence[WeightSlice]],
    ) -> list[Tensor]:
        """Returns, on every worker, the local tensor of each tensor-parallel worker of a stage; one if all hold the same."""
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
    """A generation worker that receives the broadcast."""

    def join_broadcast(self, address: str, size: int) -> None:
        """Joins the broadcast as the rank after train worker 0."""
        self._enter_device()
        rank = 1 + self.context.rank
        self._broadcast = _open_group(address, rank, size, self.context.collective_timeout_s, self._device)

    def receive_broadcast(self, version: int, described: Described) -> None:
        """Receives all tensors and loads them as `version`."""
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
        for piece in expand(self.weight_slices()):  # vLLM's CPU backend keeps no parameters to load into
            if piece.name in tensors:
                part = tensors[piece.name][tuple(slice(start, stop) for start, stop in piece.box)]
                local_view(self.weight_tensors()[piece.tensor], piece).copy_(part)


def _load_weights(worker: Any, tensors: list[tuple[str, Tensor]]) -> None:
    worker.model_runner.model.load_weights(weights=tensors)


def _open_group(address: str, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
    """Opens a process group in addition to the default one."""
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


def _by_tensor(slices: Sequence[WeightSlice]) -> dict[str, list[WeightSlice]]:
    found: dict[str, list[WeightSlice]] = {}
    for piece in expand(slices):
        found.setdefault(piece.tensor, []).append(piece)
    return found


def _assemble(parts: Sequence[Tensor], slices: Sequence[Sequence[WeightSlice]]) -> dict[str, Tensor]:
    """Returns the Hugging Face tensors contained in one tensor of a stage."""
    import torch

    used = list(zip(parts, slices, strict=False))  # one part if all ranks hold the same
    shapes: dict[str, list[int]] = {}
    for _, held in used:
        for piece in held:
            ends = [stop for _, stop in piece.box]
            shapes[piece.name] = [max(pair) for pair in zip(ends, shapes.get(piece.name, ends), strict=True)]
    wholes = {name: torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device) for name, shape in shapes.items()}
    for part, held in used:
        for piece in held:
            box = tuple(slice(start, stop) for start, stop in piece.box)
            wholes[piece.name][box].copy_(local_view(part, piece))
    return wholes


def _runs(described: Described, device: torch.device) -> Iterator[Described]:
    """Groups tensors into packed buffers: each ends with the tensor that reaches the buffer's size."""
    import torch

    run: Described = []
    limit, size = PACKED_BYTES_ON_CPU, 0
    if device.type == "cuda":
        limit = int(torch.cuda.get_device_properties(device).total_memory * PACKED_SHARE)
    for item in described:
        run.append(item)
        size += _bytes(item)
        if size >= limit:
            yield run
            run, size = [], 0
    if run:
        yield run


def _bytes(item: tuple[str, tuple[int, ...], torch.dtype]) -> int:
    return math.prod(item[1]) * item[2].itemsize


def _unpack(packed: Tensor, run: Described) -> dict[str, Tensor]:
    import torch

    parts = torch.split(packed, [_bytes(item) for item in run])
    return {name: part.view(dtype).view(shape) for (name, shape, dtype), part in zip(run, parts, strict=True)}
