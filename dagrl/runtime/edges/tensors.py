"""Torch tensors on the edges of a graph: their size, and which of them can be sent from GPU to GPU.

Torch is looked up in `sys.modules` and never imported: a process that has not imported it has no tensors.
"""

from __future__ import annotations

import copyreg
import functools
import operator
import pickle
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from dagrl.errors import RunError, error_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PLAIN = (type(None), bool, int, float, str, bytes, np.ndarray)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether `value` is a dense torch tensor."""
    torch: Any = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return False
    tensor: Any = value
    return tensor.layout is torch.strided and not tensor.is_quantized


def make_torch_picklable() -> None:
    """Makes tensors of torch's newer dtypes (FP8, uint16, ...) picklable in this process, if torch is imported.

    They pickle as an `UntypedStorage`, which torch unpickles only in `torch.load`. Here it is sent as whole bytes.
    """
    torch: Any = sys.modules.get("torch")
    storage = getattr(torch, "UntypedStorage", None)  # another thread may be importing torch
    if storage is not None and storage not in copyreg.dispatch_table:
        copyreg.pickle(storage, _reduce_storage)


def _reduce_storage(storage: Any) -> tuple[Any, ...]:
    import torch

    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return operator.methodcaller("_typed_storage"), (whole,)


def tensor_bytes(tensor: Tensor) -> int:
    """An upper bound for the bytes of a pickled tensor. Torch writes the whole storage, even if the tensor views a part of
    it.

    Raises RunError for a dtype that torch does not pickle.
    """
    _check_pickled(tensor.dtype)
    return int(tensor.untyped_storage().nbytes()) + 1024 + 32 * tensor.dim()


@functools.cache
def _check_pickled(dtype: torch.dtype) -> None:
    """Raises RunError for a dtype without a storage type, such as those smaller than a byte."""
    import torch

    try:
        pickle.dumps(torch.empty(0, dtype=dtype))
    except Exception as error:
        raise RunError(
            f"tensors of {dtype} cannot be pickled ({error_text(error)}); send tensor.view(torch.uint8), and view what "
            f"comes as {dtype}"
        ) from error


def accelerator_tensors(value: object) -> list[Tensor]:
    """Returns the tensors of `value` that are sent from GPU to GPU, if its node's result uses an accelerator transport.

    Ray sends memory from a tensor's first element on, whatever its strides, so a tensor must be contiguous. Raises RunError
    for one that is not, and for values in which tensors would not be found.
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
