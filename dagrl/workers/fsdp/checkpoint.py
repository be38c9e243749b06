"""The boxes of weights, optimizer state and reference policy that an FSDP worker gives to a checkpoint, or takes from one.

Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dagrl.refit.sources import held_boxes, local_of
from dagrl.workers.fsdp.trainer import ShardedModel, is_quantized
from dagrl.workers.train.checkpoint import Piece


@torch.no_grad()
def pieces_of(model: ShardedModel, reference: Mapping[str, Tensor] | None, *, loads: bool = False) -> Iterator[Piece]:
    """Yields the boxes that this rank holds. Of ranks with the same box DCP lets one write it.

    Quantized moments are in float32 in files, because their blocks depend on the layout. `loads`: the model gets
    their values when its step count is set.
    """
    states = model.optimizer_state()
    for name, parameter in model.parameters.items():
        if not parameter.requires_grad:  # the base model of adapters
            continue
        tensors = {"model": parameter, **{f"optimizer.{key}": value for key, value in states.get(name, {}).items()}}
        parts = {kind: local_of(tensor.detach()) for kind, tensor in tensors.items()}
        for kind, part in parts.items():
            if is_quantized(part):
                parts[kind] = part.dequantize()
                model.loaded += [(part, parts[kind])] * loads
        if reference is not None:
            parts["reference"] = reference[name]
        boxes = list(held_boxes(name, parameter))
        for kind, part in parts.items():
            if not part.ndim:  # a count of steps, the same on all ranks
                yield Piece(f"{kind}.{name}", part.view(1), (0,), (1,))
                continue
            for box, at in boxes:
                view = part[tuple(slice(start, stop) for start, stop in at)]
                yield Piece(f"{kind}.{name}", view, tuple(start for start, _ in box), tuple(parameter.shape))
