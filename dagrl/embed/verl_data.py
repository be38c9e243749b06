"""How verl's batches travel through shared memory: cut as verl cuts them, without its copies, and equal when they arrive.

verl makes a contiguous copy of each worker's rows and pickles it into Ray's object store. Here a part refers to the rows,
and its tensors are written straight into shared memory (`TensorRows`). Results of workers are written by the same reducers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagrl.runtime.edges.tensors import register_reducer

if TYPE_CHECKING:
    from torch import Tensor

Jagged = tuple[Any, Any]
"""Values and offsets of a nested tensor with the layout `torch.jagged`."""


def register_reducers(worker: object = None) -> None:
    """Makes this process write DataProtos and nested tensors on edges by their tensors. Runs in driver and workers."""
    from torch.nested._internal.nested_tensor import NestedTensor
    from verl import DataProto

    register_reducer(DataProto, _reduce_data_proto)
    register_reducer(NestedTensor, _reduce_nested)


def _reduce_data_proto(data: Any) -> tuple[Any, ...]:
    """The three fields that its own `__getstate__` keeps."""
    return _data_proto, (data.batch, data.non_tensor_batch, data.meta_info)


def _data_proto(batch: Any, non_tensor_batch: Any, meta_info: Any) -> Any:
    from verl import DataProto

    return DataProto(batch=batch, non_tensor_batch=non_tensor_batch, meta_info=meta_info)


def _reduce_nested(nested: Any) -> Any:
    """Values and offsets of a plain jagged tensor; any other one as torch does."""
    if _is_plain(nested):
        return _nested, (nested.values().detach(), nested.offsets(), nested.requires_grad)
    return nested.__reduce_ex__(5)


def _is_plain(nested: Any) -> bool:
    """Whether values and offsets describe it: on the CPU, without holes, ragged in the dimension after the rows."""
    return nested.device.type == "cpu" and nested.lengths() is None and nested._ragged_idx == 1


def _nested(values: Tensor, offsets: Tensor, requires_grad: bool = False) -> Any:
    import torch

    made = torch.nested.nested_tensor_from_jagged(values, offsets)
    return made.requires_grad_() if requires_grad else made


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Some rows of a TensorDict, which arrive as a TensorDict. `jagged` are those of its nested tensors."""

    rows: Any
    jagged: Mapping[str, Jagged]

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensor_dict, (self.rows, dict(self.jagged))


def _tensor_dict(rows: Any, jagged: Mapping[str, Jagged]) -> Any:
    for key, (values, offsets) in jagged.items():
        rows[key] = _nested(values, offsets)
    return rows


def chunks(batch: Any, count: int) -> Sequence[Any]:
    """Cuts a batch into `count` parts, with the rows that `BatchData(batch).chunk(count)` of verl would give each."""
    from tensordict import TensorDict
    from verl.protocol import BatchData

    if type(batch) is not TensorDict or len(batch) % count:
        parts: Sequence[Any] = BatchData(batch).chunk(count)
        return parts
    nested = {key: value for key, value in batch.items() if getattr(value, "is_nested", False)}
    if not all(_is_plain(value) for value in nested.values()):
        parts = BatchData(batch).chunk(count)
        return parts
    dense = TensorDict(
        {key: value for key, value in batch.items() if key not in nested}, batch_size=batch.batch_size, device=batch.device
    )
    cut = {key: _cut(value, count) for key, value in nested.items()}
    return [TensorRows(rows, {key: cut[key][at] for key in cut}) for at, rows in enumerate(dense.chunk(count))]


def _cut(nested: Any, count: int) -> list[Jagged]:
    values, offsets = nested.values().detach(), nested.offsets()
    each = (len(offsets) - 1) // count
    bounds = offsets[::each].tolist()
    return [
        (values[begin:end], offsets[at * each : (at + 1) * each + 1] - begin)
        for at, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
