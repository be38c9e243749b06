"""The whole state of a train worker in host memory, for workers with the same part of the model.

Data-parallel replicas hold the same weights and, without a sharded optimizer, the same optimizer state, bit for bit. So a
worker that takes a replica's place continues as that one would have. Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dagrl.errors import RunError
from dagrl.runtime.shapes import Array
from dagrl.workers.megatron.checkpoint import counters, random_state, restore_counters
from dagrl.workers.megatron.trainer import Trainer


@dataclass(frozen=True)
class PeerState:
    """Bytes of tensors, in the order that all replicas share; schedule, step counts and random generators."""

    tensors: list[Array]  # uint8
    reference: dict[str, Array] | None
    counters: dict[str, Any]


def copy_state(trainer: Trainer, reference: Mapping[str, Tensor] | None, others: Iterable[Tensor]) -> PeerState:
    """Returns the state of a worker. `others` are tensors that training changes and the trainer does not have."""
    trainer.offloader.reload(("weights", "optimizer"))
    return PeerState(
        [_bytes(tensor) for tensor in _tensors(trainer, others)],
        None if reference is None else {name: _bytes(tensor) for name, tensor in reference.items()},
        {"trainer": counters(trainer), "random": random_state()},
    )


def restore_state(trainer: Trainer, state: PeerState, others: Iterable[Tensor]) -> dict[str, Tensor] | None:
    """Writes `state` into a worker that was just set up. Returns the reference policy's weights, if there are any."""
    mine = _tensors(trainer, others)
    sizes = [tensor.nbytes for tensor in mine], [content.nbytes for content in state.tensors]
    if sizes[0] != sizes[1]:
        raise RunError(
            f"a peer's state has {len(sizes[1])} tensors of {sum(sizes[1])} bytes, and this worker {len(sizes[0])} of "
            f"{sum(sizes[0])}: they do not hold the same part of the model"
        )
    with torch.no_grad():
        for tensor, content in zip(mine, state.tensors, strict=True):
            tensor.copy_(_tensor(content, tensor))
    restore_counters(trainer, state.counters)
    if state.reference is None:
        return None
    weights = trainer.model.tensors()
    return {name: _tensor(content, weights[name]) for name, content in state.reference.items()}


def _tensors(trainer: Trainer, others: Iterable[Tensor]) -> list[Tensor]:
    return [*trainer.weight_tensors(), *trainer.optimizer_tensors(), *others]


def _bytes(tensor: Tensor) -> Array:
    """The content as bytes, without a copy if it is in host memory."""
    content: Array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


def _tensor(content: Array, like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(content)).view(like.dtype).reshape(like.shape)
