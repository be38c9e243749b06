"""Pickles values with their large buffers apart, among them the elements of torch tensors on the CPU.

The driver pickles an input of any type once (`Encoded`), and each worker unpickles it where it uses it. So its size is known
before it is sent, and a worker unpickles only its own part (`Shares`).

Torch is looked up in `sys.modules` and never imported: a process that has not imported it has no tensors.
"""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from dagrl.errors import RunError, error_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Bytes = bytes | memoryview


class UnreadableError(RunError):
    """A whole message arrived, but this process cannot unpickle it."""


def dump(value: object, in_band: bool = False, plain: bool = False) -> list[Bytes]:
    """Returns a value as a pickle and its buffers, or everything `in_band`.

    Buffers are those of arrays and of tensors on the CPU. `plain`: the value holds no tensors and no objects, which saves a
    microsecond. What plain pickle cannot send (functions, classes of a script) is sent by value.
    """
    make_torch_picklable()  # a relay writes values that it has not sized
    buffers: list[pickle.PickleBuffer] = []
    apart = None if in_band else buffers.append
    try:
        if plain:
            pickled = pickle.dumps(value, protocol=5, buffer_callback=apart)
        else:
            pickled = _dumps(pickle.Pickler, value, copyreg.dispatch_table, apart)
        by_reference = b"__main__" not in pickled
    except (pickle.PicklingError, AttributeError, TypeError):
        by_reference = False
    if not by_reference:
        from ray.cloudpickle import CloudPickler

        buffers.clear()
        pickled = _dumps(CloudPickler, value, CloudPickler.dispatch_table, apart)
    return [pickled, *[buffer.raw() for buffer in buffers]]


def _dumps(pickler_class: Any, value: object, table: Mapping[type, Any], apart: Callable[..., Any] | None) -> bytes:
    file = io.BytesIO()
    pickler = pickler_class(file, protocol=5, buffer_callback=apart)
    pickler.dispatch_table = {**table, **edge_reducers()}
    pickler.dump(value)
    return file.getvalue()


def load(pickled: Bytes, buffers: Sequence[Bytes | bytearray] = ()) -> Any:
    """Returns the value that `dump` was given. Raises UnreadableError if this process cannot make it."""
    try:
        return pickle.loads(pickled, buffers=buffers)  # noqa: S301  # written by a process of the same run
    except Exception as error:  # raised by the value's own classes
        raise UnreadableError(
            f"{error_text(error)}, when a value was unpickled; send only values that every process of the phase can import "
            "and unpickle"
        ) from error


@dataclass(eq=False, slots=True)
class Encoded:
    """A pickled value with its large buffers apart, which are sent without being copied into the pickle."""

    pickled: Bytes
    buffers: Sequence[Bytes | bytearray]

    @staticmethod
    def of(value: object) -> Encoded:
        """Pickles a value. Raises RunError if it cannot be pickled."""
        try:
            pickled, *buffers = dump(value)
        except RunError:
            raise
        except Exception as error:  # raised by the value's own classes
            raise RunError(
                f"a {type(value).__name__} cannot be pickled ({error_text(error)}); send plain data, arrays or tensors"
            ) from error
        return Encoded(pickled, buffers)

    @property
    def payload_bytes(self) -> int:
        """An upper bound for its bytes in a channel."""
        return 256 + len(self.pickled) + sum([256 + len(buffer) for buffer in self.buffers])

    def load(self) -> Any:
        """Returns the value. Raises UnreadableError if this process cannot make it."""
        return load(self.pickled, self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoded, (self.pickled, [pickle.PickleBuffer(buffer) for buffer in self.buffers])


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of an input for the workers of one graph, in their order. Equal parts may be one object, sent once."""

    parts: tuple[Encoded, ...]

    @property
    def payload_bytes(self) -> int:
        """An upper bound for its bytes in a channel."""
        return 256 + sum(part.payload_bytes for part in {id(part): part for part in self.parts}.values())


PLAIN = (type(None), bool, int, float, str, bytes, np.ndarray)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Returns whether `value` is a dense torch tensor."""
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


_registered: dict[type, Callable[[Any], Any]] = {}


def register_reducer(kind: type, reduce: Callable[[Any], Any]) -> None:
    """Makes values of exactly this type pickle on this process's edges as `reduce(value)`, a tuple like `__reduce__`'s."""
    _registered[kind] = reduce


def edge_reducers() -> Mapping[type, Callable[[Any], Any]]:
    """Returns how values on edges are pickled, by their exact type, if their modules are imported.

    The elements of a tensor on the CPU go into a buffer of their own. Torch would write them into the pickle, at a twentieth
    of the speed. An ObjectRef is refused.
    """
    torch: Any = sys.modules.get("torch")
    ray: Any = sys.modules.get("ray")
    reducers = dict(_registered)
    if (tensor := getattr(torch, "Tensor", None)) is not None:  # another thread may be importing torch
        reducers[tensor] = _reduce_tensor
    if (reference := getattr(ray, "ObjectRef", None)) is not None:
        reducers[reference] = refuse_reference
    return reducers


def refuse_reference(reference: object) -> Any:
    raise RunError(
        "an ObjectRef cannot be sent through a phase: the receiver holds no reference and would block forever; "
        "send the value itself, ray.get(ref)"
    )


def _reduce_tensor(tensor: Tensor) -> Any:
    """Sends a dense tensor on the CPU as its elements, contiguous; any other one as torch does."""
    if not is_tensor(tensor) or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or tensor.__dict__:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    import torch

    whole = tensor.detach().contiguous()
    elements: Any = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()  # one element may have any stride
    return _tensor_of, (pickle.PickleBuffer(elements), whole.dtype, tuple(whole.shape), tensor.requires_grad)


def _tensor_of(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    """Returns a tensor in the memory of `buffer`, or in a copy if others read it too: torch has no read-only tensors."""
    import torch

    with memoryview(buffer) as view:
        if view.nbytes == 0:
            return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
        own = bytearray(view) if view.readonly else buffer
    tensor = torch.frombuffer(own, dtype=torch.uint8).view(dtype).view(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def tensor_bytes(tensor: Tensor) -> int:
    """Returns an upper bound of the bytes of a pickled tensor. Torch writes the whole storage, even if the tensor views a
    part of it; edges write the elements, even if several share their memory.
    """
    return max(int(tensor.untyped_storage().nbytes()), tensor.nbytes) + 1024 + 32 * tensor.dim()


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
