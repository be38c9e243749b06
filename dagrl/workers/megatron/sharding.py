"""Train state as Megatron-Core's sharded tensors: the entries that a rank saves to a checkpoint and loads from it.

Every weight, moment and float32 master weight is a box of a global tensor that does not depend on the layout
(`sharded_state_dict` of Megatron's modules). One data-parallel replica writes each box: in turns if all hold it; with a
sharded optimizer the one that holds most of it, after receiving the rest. So a checkpoint can be loaded in any layout, with
or without a sharded optimizer. Imported only where Megatron is.
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

from dagrl.workers.megatron.lora import LayerAdapters
from dagrl.workers.megatron.trainer import Trainer

STATE = "optimizer.state"  # prefix of Megatron's own optimizers
REFERENCE = "reference"

ElementRange = tuple[int, int]
ToHost = Callable[[Tensor], Tensor]
"""Copies a tensor to host memory. The copy may complete asynchronously on the current stream."""


@dataclass(frozen=True)
class ShardedParameter:
    """One weight of this rank: local name, Megatron's sharding, and the group of its data-parallel replicas."""

    name: str
    parameter: Tensor
    sharded: Any  # ShardedTensor, or ShardedTensorFactory
    group: Any

    @property
    def is_replica(self) -> bool:
        """Whether another tensor- or pipeline-parallel rank writes the same box."""
        return any(self.sharded.replica_id[:-1])

    def entry(self, key: str, data: Tensor) -> Any:
        """Returns a sharded tensor of the same box with other content and name, written by this rank."""
        main = (0,) * len(self.sharded.replica_id)
        if isinstance(self.sharded, ShardedTensorFactory):
            return replace(self.sharded, key=key, data=data, replica_id=main)
        return replace(self.sharded, key=key, data=data, dtype=data.dtype, replica_id=main)

    def weights(self, reference: Mapping[str, Tensor] | None) -> list[Any]:
        """Returns the entries of the weight and, if there is one, of the reference policy's."""
        others = [] if reference is None else [self.entry(f"{REFERENCE}.{self.sharded.key}", reference[self.name])]
        return [self.entry(self.sharded.key, self.parameter.data), *others]


@dataclass(frozen=True)
class LoadTarget:
    """Loads `entry.key` to `entry.data`. If `into` is set, the range `span` is then copied to `into`."""

    entry: Any
    into: Tensor | None = None
    span: ElementRange = (0, 0)

    def receive(self, loaded: Tensor) -> None:
        """Copies loaded content to its target, unless it is there already."""
        if self.into is not None:
            self.into.copy_(loaded.reshape(-1)[slice(*self.span)])
        elif loaded.data_ptr() != self.entry.data.data_ptr():
            self.entry.data.copy_(loaded.view_as(self.entry.data))


def sharded_parameters(trainer: Trainer) -> list[ShardedParameter]:
    """Returns the parameters that training changes on this rank, in the same order on all data-parallel replicas."""
    return _sharded(trainer, trainer.model.trained())


def sharded_biases(trainer: Trainer) -> list[ShardedParameter]:
    """Returns the expert biases, which have no optimizer state; none with LoRA, which leaves them as they are."""
    return _sharded(trainer, {} if trainer.settings.policy.megatron_cfg.peft.enabled else trainer.model.expert_biases())


def _sharded(trainer: Trainer, weights: Mapping[str, Tensor]) -> list[ShardedParameter]:
    sharded: dict[int, Any] = {}
    for chunk in trainer.model.chunks:
        adapters = [value for module in chunk.modules() if isinstance(module, LayerAdapters) for value in module.sharded()]
        for value in (*chunk.sharded_state_dict().values(), *adapters):
            if isinstance(value, ShardedTensor | ShardedTensorFactory):
                sharded[id(value.data)] = value
    return [
        ShardedParameter(name, weight, sharded[id(weight)], _replica_group(weight))
        for name, weight in sorted(weights.items())
    ]


def entries_to_save(trainer: Trainer, reference: Mapping[str, Tensor] | None, to_host: ToHost) -> list[Any]:
    """Returns the sharded tensors that this rank saves: live tensors, and gathered ones copied by `to_host`.

    A collective over the data-parallel replicas, which send each other their shards.
    """
    entries = []
    for number, shard in enumerate(sharded_parameters(trainer)):
        mine = number % dist.get_world_size(shard.group) == dist.get_rank(shard.group)
        if _is_sharded(trainer):
            states = _gathered_states(trainer, shard, to_host)
        else:
            states = _local_states(trainer, shard) if mine else {}
        if shard.is_replica:
            continue
        entries += shard.weights(reference) if mine else []
        entries += [shard.entry(_state_key(shard, name), tensor) for name, tensor in states.items()]
    for shard in sharded_biases(trainer):
        if not shard.is_replica and not dist.get_rank(shard.group):
            entries += shard.weights(reference)
    return entries


def load_targets(trainer: Trainer, reference: Mapping[str, Tensor] | None) -> Iterator[LoadTarget]:
    """Yields the target of each tensor in a checkpoint. `reference` is set if it has a reference policy.

    Elements outside the checkpoint (vocabulary padding) become 0.
    """
    for shard in (*sharded_biases(trainer), *sharded_parameters(trainer)):
        shard.parameter.data.zero_()
        yield from map(LoadTarget, shard.weights(reference))
        if not shard.parameter.requires_grad:
            continue
        span = _spans(trainer, shard)[dist.get_rank(shard.group)] if _is_sharded(trainer) else None
        for name, tensor in _local_states(trainer, shard).items():
            if span is None:
                yield LoadTarget(shard.entry(_state_key(shard, name), tensor.zero_()))
            else:
                whole = torch.zeros(shard.parameter.shape, dtype=tensor.dtype)
                yield LoadTarget(shard.entry(_state_key(shard, name), whole), tensor, span)


def step_count(trainer: Trainer) -> float:
    """Returns Adam's step count, which is equal for all parameters."""
    counts = [float(state["step"]) for inner in trainer.inner_optimizers() for state in inner.state.values()]
    return max(counts, default=0.0)


def set_step_count(trainer: Trainer, count: float) -> None:
    """Sets Adam's step count of all parameters."""
    for inner in trainer.inner_optimizers():
        for state in inner.state.values():
            state["step"].fill_(count)


def _state_key(shard: ShardedParameter, name: str) -> str:
    return f"{STATE}.{name}.{shard.sharded.key}"


def _replica_group(parameter: Tensor) -> Any:
    """Returns the group of a parameter's replicas. Megatron marks experts, which have their own, by `allreduce`."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _is_sharded(trainer: Trainer) -> bool:
    return trainer.settings.policy.megatron_cfg.optimizer.use_distributed_optimizer


def _local_states(trainer: Trainer, shard: ShardedParameter) -> dict[str, Tensor]:
    """Returns moments and the master weight, if any. With a sharded optimizer: this rank's flat shard of them."""
    main = _main_parameter(trainer, shard)
    if main is None:
        return {}
    (state,) = [inner.state[main] for inner in trainer.inner_optimizers() if main in inner.state]
    found = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    if main.untyped_storage()._cdata != shard.parameter.untyped_storage()._cdata:
        found["fp32_param"] = main.data
    return found


def _main_parameter(trainer: Trainer, shard: ShardedParameter) -> Tensor | None:
    """Returns the tensor that the optimizer updates for a parameter: master weight, shard or itself. None: on a replica."""
    if not _is_sharded(trainer):
        main: Tensor = getattr(shard.parameter, "main_param", shard.parameter)
        return main
    for part in trainer.optimizers():
        where = part.model_param_group_index_map.get(shard.parameter)
        if where is not None:
            group, order = where
            piece: Tensor = part.optimizer.param_groups[group]["params"][order]
            return piece
    return None


def _spans(trainer: Trainer, shard: ShardedParameter) -> list[ElementRange]:
    """Returns the elements of the flat parameter that each replica updates. Buckets are split into equal shards."""
    for chunk in trainer.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            if shard.parameter in buffer.param_index_map:
                return _spans_in(buffer, shard.parameter)
    raise AssertionError(f"{shard.name} is in no gradient buffer")


def _spans_in(buffer: Any, parameter: Tensor) -> list[ElementRange]:
    start, stop, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    share = bucket.grad_data.numel() // buffer.data_parallel_world_size
    spans = []
    for rank in range(buffer.data_parallel_world_size):
        first = bucket.offset + rank * share
        low, high = max(start, first), min(stop, first + share)
        spans.append((low - start, high - start) if low < high else (0, 0))
    return spans


def _gathered_states(trainer: Trainer, shard: ShardedParameter, to_host: ToHost) -> dict[str, Tensor]:
    """Gathers a parameter's states, with a sharded optimizer, on the replica that holds most; {} on the others."""
    spans, rank = _spans(trainer, shard), dist.get_rank(shard.group)
    owner = max(range(len(spans)), key=lambda replica: spans[replica][1] - spans[replica][0])
    held, found = _local_states(trainer, shard), {}
    if rank != owner:
        for tensor in held.values():
            dist.send(tensor, dist.get_global_rank(shard.group, owner), group=shard.group)
        return {}
    for name, tensor in held.items():
        whole = torch.empty(shard.parameter.numel(), dtype=tensor.dtype, device=tensor.device)
        for replica, span in enumerate(spans):
            if replica == owner:
                whole[slice(*span)] = tensor
            elif span[0] < span[1]:
                dist.recv(whole[slice(*span)], dist.get_global_rank(shard.group, replica), group=shard.group)
        found[name] = to_host(whole).view(shard.parameter.shape)
    return found
