"""Torch tensors on the edges of a graph: the room they need, and what can go from GPU to GPU.

Torch is looked up, never imported: a process that has not imported it has no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from dagrl.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = (type(None), bool, int, float, str, bytes, np.ndarray)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether `value` is a dense torch tensor."""
    torch: Any = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return False
    tensor: Any = value
    return tensor.layout is torch.strided and not tensor.is_quantized


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a pickled tensor, an upper bound: torch writes its whole storage, whatever part of it the tensor views."""
    return int(tensor.untyped_storage().nbytes()) + 1024 + 32 * tensor.dim()


def accelerator_tensors(value: object) -> list[Tensor]:
    """The tensors of `value` that travel from GPU to GPU, for a node whose result goes over an accelerator transport.

    Ray sends the memory from a tensor's first element on, whatever its strides, so a tensor must be contiguous. Raises
    RunError for one that is not, and for values in which tensors would not be found.
    """
    tensors = [tensor for tensor in _tensors(value) if tensor.device.type != "cpu"]
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise RunError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be sent from GPU to GPU; "
                "return tensor.contiguous()"
            )
    return tensors


def _tensors(value: object) -> Iterator[Tensor]:
    if is_tensor(value):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif not isinstance(value, PLAIN):
        raise RunError(
            f"a {type(value).__name__} cannot be sent from GPU to GPU; return tensors, or lists, tuples and dictionaries of "
            "tensors, arrays and numbers"
        )
