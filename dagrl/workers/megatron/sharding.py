"""Train state as pieces of global tensors, which a rank saves to a checkpoint and loads from it.

Every weight, moment and float32 master weight is a box of a global tensor that does not depend on the layout
(`sharded_state_dict` of Megatron's modules). One data-parallel replica writes each box: in turns if all hold it; with a
sharded optimizer each writes its own range of the flat parameter, as a few boxes. So a checkpoint can be loaded in any
layout, with or without a sharded optimizer. Imported only where Megatron is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from dagrl.workers.megatron.lora import LayerAdapters
from dagrl.workers.megatron.trainer import Trainer
from dagrl.workers.train.checkpoint import Piece, range_boxes

STATE = "optimizer.state"  # prefix of Megatron's own optimizers
REFERENCE = "reference"

ElementRange = tuple[int, int]


@dataclass(frozen=True)
class ShardedParameter:
    """One weight of this rank: local name, Megatron's boxes of it from top to bottom, and its data-parallel replicas.

    A fused gate and up projection has two boxes, others one. `is_replica`: another tensor- or pipeline-parallel rank writes
    the same boxes.
    """

    name: str
    parameter: Tensor
    boxes: Sequence[Any]  # ShardedTensor
    is_replica: bool
    group: Any

    def pieces(self, prefix: str, content: Tensor, span: ElementRange | None = None) -> Iterator[Piece]:
        """Yields the pieces of a tensor of the parameter's shape, or of the elements `span` of one, which `content` has."""
        first, last = span or (0, self.parameter.numel())
        flat, offset, below = content.view(-1), 0, 0
        for box in self.boxes:
            above, below = below, below + box.data.numel()
            shape = (*(1 for _ in range(box.prepend_axis_num)), *box.local_shape)
            for at, size in range_boxes(shape, max(first, above) - above, min(last, below) - above):
                part, offset = flat[offset : offset + math.prod(size)].view(size), offset + math.prod(size)
                offsets = tuple(map(add, box.global_offset, at))
                yield Piece(f"{prefix}{box.key}", part, offsets, tuple(box.global_shape), box.allow_shape_mismatch)

    def weights(self, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
        """Yields the pieces of the weight and, if there is one, of the reference policy's."""
        yield from self.pieces("", self.parameter.data)
        if reference is not None:
            yield from self.pieces(f"{REFERENCE}.", reference[self.name])

    def states(self, trainer: Trainer) -> Iterator[Piece]:
        """Yields the pieces of moments and any master weight; with a sharded optimizer those of this rank's range."""
        span = _span(trainer, self) if _is_sharded(trainer) else None
        for name, content in _local_states(trainer, self).items():
            yield from self.pieces(f"{STATE}.{name}.", content, span)


def _sharded(trainer: Trainer, weights: Mapping[str, Tensor]) -> list[ShardedParameter]:
    """Returns the weights on this rank, in the same order on all data-parallel replicas."""
    sharded: dict[int, Any] = {}
    for chunk in trainer.model.chunks:
        adapters = [value for module in chunk.modules() if isinstance(module, LayerAdapters) for value in module.sharded()]
        for value in (*chunk.sharded_state_dict().values(), *adapters):
            if isinstance(value, ShardedTensor | ShardedTensorFactory):
                sharded[id(value.data)] = value
    parameters: list[ShardedParameter] = []
    for name, weight in sorted(weights.items()):
        layout = sharded[id(weight)]
        # Megatron marks experts, which have replicas of their own, by `allreduce`.
        dense = getattr(weight, "allreduce", True)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        group = replicas if dense else parallel_state.get_expert_data_parallel_group()
        boxes = layout.build() if isinstance(layout, ShardedTensorFactory) else [layout]
        assert all(box.data.is_contiguous() for box in boxes), f"{layout.key} is not split along its first axis"
        parameters.append(ShardedParameter(name, weight, boxes, any(layout.replica_id[:-1]), group))
    return parameters


def _biases(trainer: Trainer) -> Mapping[str, Tensor]:
    """Returns the expert biases, which have no optimizer state; none with LoRA, which leaves them as they are."""
    return {} if trainer.settings.policy.peft.enabled else trainer.model.expert_biases()


def pieces_to_save(trainer: Trainer, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
    """Yields the pieces that this rank saves: live tensors."""
    for number, shard in enumerate(_sharded(trainer, trainer.model.trained())):
        mine = number % dist.get_world_size(shard.group) == dist.get_rank(shard.group)
        if mine and not shard.is_replica:
            yield from shard.weights(reference)
        if (mine or _is_sharded(trainer)) and not shard.is_replica:
            yield from shard.states(trainer)
    for shard in _sharded(trainer, _biases(trainer)):
        if not shard.is_replica and not dist.get_rank(shard.group):
            yield from shard.weights(reference)


def pieces_to_load(trainer: Trainer, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
    """Yields the pieces that this rank loads in place. `reference` is set if the checkpoint has a reference policy."""
    for shard in _sharded(trainer, _biases(trainer)):
        yield from shard.weights(reference)
    for shard in _sharded(trainer, trainer.model.trained()):
        yield from shard.weights(reference)
        yield from shard.states(trainer)


def _is_sharded(trainer: Trainer) -> bool:
    return trainer.settings.policy.megatron_cfg.use_distributed_optimizer


def _local_states(trainer: Trainer, shard: ShardedParameter) -> dict[str, Tensor]:
    """Returns moments and the master weight, if any. With a sharded optimizer: this rank's flat shard of them."""
    main = _main_parameter(trainer, shard)
    if main is None:
        return {}
    (state,) = [inner.state[main] for inner in trainer.inner_optimizers() if main in inner.state]
    states = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    if main.untyped_storage()._cdata != shard.parameter.untyped_storage()._cdata:
        states["fp32_param"] = main.data
    return states


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


def _span(trainer: Trainer, shard: ShardedParameter) -> ElementRange:
    """Returns the elements of the flat parameter that this replica updates. Buckets are split into equal shards."""
    for chunk in trainer.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            if shard.parameter in buffer.param_index_map:
                start, stop, number = buffer.param_index_map[shard.parameter]
                bucket, replicas = buffer.buckets[number], buffer.data_parallel_world_size
                share = bucket.grad_data.numel() // replicas
                first = bucket.offset + dist.get_rank(shard.group) * share
                low, high = max(start, first), min(stop, first + share)
                return (low - start, high - start) if low < high else (0, 0)
    raise AssertionError(f"{shard.name} is in no gradient buffer")
