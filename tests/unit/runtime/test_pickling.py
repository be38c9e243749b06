"""Values as bytes, also tensors that only torch could send."""

from __future__ import annotations

import copyreg
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dagrl.errors import RunError
from dagrl.runtime.edges.packet import Header, Packet, payload_bytes
from dagrl.runtime.edges.pickling import UnreadableError, accelerator_tensors, dump, load
from dagrl.telemetry.metrics import StepMetrics

HEADER = Header("phase", 7, True, {"train": (1, 2)}, 10.0)
NEWER = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32"]


@dataclass
class Holding:
    tensor: torch.Tensor


def test_a_class_that_the_reader_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(Packet(HEADER, Holding(torch.zeros(2))).wire())
    monkeypatch.delattr("tests.unit.runtime.test_pickling.Holding")
    with pytest.raises(UnreadableError, match=r"Can't get attribute 'Holding'.* when a value was unpickled; send"):
        load(pickled)


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_torchs_newer_dtypes_fit_their_size(name: str) -> None:
    raw = torch.arange(96, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, name)).view(-1, 2)[1:].t()
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    for value in (tensor, {"a": [tensor, 1]}, Holding(tensor), parameter):
        limit = payload_bytes(value)
        parts = dump(value)
        assert sum(map(len, parts)) <= limit
        found = load(parts[0], parts[1:])
        one = found["a"][0] if isinstance(found, dict) else found.tensor if isinstance(found, Holding) else found
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(one.t().contiguous().view(torch.uint8), tensor.t().contiguous().view(torch.uint8))


def test_a_process_that_has_sized_nothing_writes_readable_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay is such a process: it passes on what it has read."""
    monkeypatch.delitem(copyreg.dispatch_table, torch.UntypedStorage, raising=False)
    pickled, *buffers = dump(torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert load(pickled, buffers).view(torch.uint8).tolist() == [0, 1, 2, 3]


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16]),
    cut=st.sampled_from(["whole", "rows", "columns", "transposed", "expanded", "conjugate"]),
    in_band=st.booleans(),
    grad=st.booleans(),
)
def test_tensors_arrive_as_they_were(shape: list[int], dtype: torch.dtype, cut: str, in_band: bool, grad: bool) -> None:
    whole = torch.arange(math.prod(shape)).to(dtype).view(shape)
    cuts = {"rows": whole[1:], "columns": whole[:, 1:]} if len(shape) > 1 else {}
    cuts |= {"transposed": whole.permute(tuple(reversed(range(len(shape))))), "expanded": whole.expand(2, *shape)}
    tensor = (cuts | {"conjugate": whole.conj()}).get(cut, whole)
    if grad and dtype.is_floating_point:
        tensor = tensor.detach().requires_grad_()
    pickled, *buffers = dump({"a": [tensor, tensor]}, in_band=in_band)
    found, same = load(pickled, [bytearray(buffer) for buffer in buffers])["a"]
    assert found is same and bool(buffers) == (not in_band and not tensor.is_conj())
    assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))


def test_a_part_of_a_tensor_is_sent_alone_and_used_in_place() -> None:
    rows = torch.arange(40_000.0).view(8, 5000)
    pickled, buffer = dump(rows[2:3])
    assert len(pickled) + len(buffer) < 4 * 5000 + 1000
    theirs = bytearray(buffer)
    found = load(pickled, [theirs])
    found.zero_()
    assert not any(theirs), "the tensor is a view of the message"
    shared = load(pickled, [memoryview(buffer).toreadonly()])
    shared.zero_()
    assert rows[2, 1] == 10_001.0, "what others read too is copied"


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
SHAPES = st.lists(st.integers(0, 4), max_size=8)


@given(SHAPES, DTYPES, st.booleans(), st.booleans())
def test_the_bytes_of_a_tensor_bound_its_pickle(shape: list[int], dtype: torch.dtype, view: bool, grad: bool) -> None:
    tensor = torch.zeros([3, *shape], dtype=dtype)[1] if view else torch.zeros(shape, dtype=dtype)
    if grad and dtype.is_floating_point:
        tensor = tensor.requires_grad_() * 2
    for value in (tensor, [tensor, 1.0], {"x": (tensor, tensor)}):
        assert len(pickle.dumps(value, protocol=5)) <= payload_bytes(value)
        assert len(dump(value, in_band=True)[0]) <= payload_bytes(value)
    assert payload_bytes(tensor) <= 3 * tensor.nbytes + 2048


def test_accelerator_tensors_are_found_in_containers() -> None:
    here, there = torch.zeros(2), torch.zeros(3, device="meta")  # any device that is not the CPU
    value = {"a": [there, here], "b": (1, None, "c", np.zeros(2)), "d": there}
    assert [id(tensor) for tensor in accelerator_tensors(value)] == [id(there), id(there)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [torch.zeros(3, 2, device="meta").T], r"shape \(2, 3\) and strides \(1, 2\).*return tensor.contiguous"),
        (lambda: StepMetrics(), "a StepMetrics cannot be sent from GPU to GPU"),
    ],
)
def test_tensors_that_cannot_go_over_an_accelerator_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        accelerator_tensors(make())
