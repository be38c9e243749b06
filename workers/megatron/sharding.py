"""Train state as Megatron-Core's sharded tensors: what one rank writes of a checkpoint, and where it puts what it reads.

Every weight, moment and float32 master weight is a box of a global tensor that does not depend on the layout
(`sharded_state_dict` of Megatron's modules says which). Of the data-parallel replicas of a box one writes it: in turn where
all hold it, and where the optimizer is sharded over them the one that holds most of it, given the rest by the others. So a
checkpoint can be read at any layout, with a sharded optimizer or without. Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from workers.megatron.optimizer import Trainer

STATE = "optimizer.state"  # what Megatron's own optimizers prefix their tensors with
REFERENCE = "reference"

Sharded = ShardedTensor | ShardedTensorFactory
Span = tuple[int, int]
ToHost = Callable[[Tensor], Tensor]
"""Gives a tensor's content in host memory, from a GPU at the latest when the current stream has come so far."""


@dataclass(frozen=True)
class Place:
    """One parameter of this rank: its name here, how Megatron shards it, and the group of its data-parallel replicas."""

    name: str
    parameter: torch.nn.Parameter
    sharded: Any  # Sharded
    group: Any

    @property
    def is_replica(self) -> bool:
        """Whether another tensor- or pipeline-parallel rank holds the same box and writes it."""
        return any(self.sharded.replica_id[:-1])

    def entry(self, key: str, data: Tensor) -> Any:
        """The sharded tensor of the same box with other content under another name, written by this rank."""
        main = (0,) * len(self.sharded.replica_id)
        if isinstance(self.sharded, ShardedTensorFactory):
            return replace(self.sharded, key=key, data=data, replica_id=main)
        return replace(self.sharded, key=key, data=data, dtype=data.dtype, replica_id=main)


@dataclass(frozen=True)
class Target:
    """What is read under `entry.key` goes into `entry.data`, and from there, where `into` is set, its `span` into `into`."""

    entry: Any
    into: Tensor | None = None
    span: Span = (0, 0)

    def receive(self, loaded: Tensor) -> None:
        """Take what was read; what is in place already is not copied."""
        if self.into is not None:
            self.into.copy_(loaded.reshape(-1)[slice(*self.span)])
        elif loaded.data_ptr() != self.entry.data.data_ptr():
            self.entry.data.copy_(loaded.view_as(self.entry.data))


def places(trainer: Trainer) -> list[Place]:
    """All parameters of this rank, in the same order on all data-parallel replicas."""
    sharded: dict[int, Any] = {}
    for chunk in trainer.model.chunks:
        for value in chunk.sharded_state_dict().values():
            if isinstance(value, ShardedTensor | ShardedTensorFactory):
                sharded[id(value.data)] = value
    return [
        Place(name, parameter, sharded[id(parameter)], _replica_group(parameter))
        for name, parameter in sorted(trainer.model.parameters().items())
    ]


def written(trainer: Trainer, reference: Mapping[str, Tensor] | None, to_host: ToHost) -> list[Any]:
    """The sharded tensors that this rank writes: live ones, and those that it joined, by `to_host`.

    Together with its data-parallel replicas; they send each other pieces.
    """
    entries = []
    for number, place in enumerate(places(trainer)):
        mine = number % dist.get_world_size(place.group) == dist.get_rank(place.group)
        whole = _gathered_states(trainer, place, to_host)
        if place.is_replica:
            continue
        if mine:
            entries.append(place.entry(place.sharded.key, place.parameter.data))
        if mine and reference is not None:
            entries.append(place.entry(f"{REFERENCE}.{place.sharded.key}", reference[place.name]))
        if whole is None:
            whole = _local_states(trainer, place) if mine else {}
        entries += [place.entry(_state_key(place, name), tensor) for name, tensor in whole.items()]
    return entries


def targets(trainer: Trainer, reference: Mapping[str, Tensor] | None) -> Iterator[Target]:
    """Where the content of a checkpoint goes, one tensor after the other; `reference` if it holds a reference policy.

    What lies beyond a checkpoint's own extent (padding of a vocabulary) becomes 0.
    """
    for place in places(trainer):
        yield Target(place.entry(place.sharded.key, place.parameter.data.zero_()))
        if reference is not None:
            yield Target(place.entry(f"{REFERENCE}.{place.sharded.key}", reference[place.name]))
        span = _spans(trainer, place)[dist.get_rank(place.group)] if _is_sharded(trainer) else None
        for name, tensor in _local_states(trainer, place).items():
            if span is None:
                yield Target(place.entry(_state_key(place, name), tensor.zero_()))
            else:
                whole = torch.zeros(place.parameter.shape, dtype=tensor.dtype)
                yield Target(place.entry(_state_key(place, name), whole), tensor, span)


def step_count(trainer: Trainer) -> float:
    """Steps that Adam has counted; the same for every parameter."""
    counts = [float(state["step"]) for inner in trainer.inner_optimizers() for state in inner.state.values()]
    return max(counts, default=0.0)


def set_step_count(trainer: Trainer, count: float) -> None:
    """The inverse of `step_count`."""
    for inner in trainer.inner_optimizers():
        for state in inner.state.values():
            state["step"].fill_(count)


def _state_key(place: Place, name: str) -> str:
    return f"{STATE}.{name}.{place.sharded.key}"


def _replica_group(parameter: torch.nn.Parameter) -> Any:
    """Experts have replicas of their own (`allreduce` is what Megatron tells them by)."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _is_sharded(trainer: Trainer) -> bool:
    return trainer.settings.policy.megatron_cfg.optimizer.use_distributed_optimizer


def _local_states(trainer: Trainer, place: Place) -> dict[str, Tensor]:
    """Moments, and the master weight if there is one; of a sharded optimizer the flat piece that this rank holds, if any."""
    main = _main_parameter(trainer, place)
    if main is None:
        return {}
    (state,) = [inner.state[main] for inner in trainer.inner_optimizers() if main in inner.state]
    found = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    if main.untyped_storage()._cdata != place.parameter.untyped_storage()._cdata:
        found["fp32_param"] = main.data
    return found


def _main_parameter(trainer: Trainer, place: Place) -> Tensor | None:
    """What the optimizer steps for a parameter: its master weight, a piece of it, or itself; None when a replica does."""
    if not _is_sharded(trainer):
        main: Tensor = getattr(place.parameter, "main_param", place.parameter)
        return main
    for part in trainer.parts():
        where = part.model_param_group_index_map.get(place.parameter)
        if where is not None:
            group, order = where
            piece: Tensor = part.optimizer.param_groups[group]["params"][order]
            return piece
    return None


def _spans(trainer: Trainer, place: Place) -> list[Span]:
    """Elements of the flat parameter that each replica's optimizer steps; a bucket is cut into equal parts."""
    for chunk in trainer.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            if place.parameter in buffer.param_index_map:
                return _spans_in(buffer, place.parameter)
    raise AssertionError(f"{place.name} is in no gradient buffer")


def _spans_in(buffer: Any, parameter: torch.nn.Parameter) -> list[Span]:
    start, stop, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    share = bucket.grad_data.numel() // buffer.data_parallel_world_size
    spans = []
    for rank in range(buffer.data_parallel_world_size):
        first = bucket.offset + rank * share
        low, high = max(start, first), min(stop, first + share)
        spans.append((low - start, high - start) if low < high else (0, 0))
    return spans


def _gathered_states(trainer: Trainer, place: Place, to_host: ToHost) -> dict[str, Tensor] | None:
    """The whole states of a parameter on the replica that holds most of them, {} on the others; None if not sharded."""
    if not _is_sharded(trainer):
        return None
    spans, rank = _spans(trainer, place), dist.get_rank(place.group)
    owner = max(range(len(spans)), key=lambda replica: spans[replica][1] - spans[replica][0])
    held, found = _local_states(trainer, place), {}
    if rank != owner:
        for tensor in held.values():
            dist.send(tensor, dist.get_global_rank(place.group, owner), group=place.group)
        return {}
    for name, tensor in held.items():
        whole = torch.empty(place.parameter.numel(), dtype=tensor.dtype, device=tensor.device)
        for replica, span in enumerate(spans):
            if replica == owner:
                whole[slice(*span)] = tensor
            elif span[0] < span[1]:
                dist.recv(whole[slice(*span)], dist.get_global_rank(place.group, replica), group=place.group)
        found[name] = to_host(whole).view(place.parameter.shape)
    return found
