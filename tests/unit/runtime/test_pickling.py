"""Values as bytes: what is left of a message that cannot be unpickled, and tensors that only torch could send."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dagrl.errors import WorkerFailure
from dagrl.runtime.edges.packet import Header, Packet, payload_bytes
from dagrl.runtime.edges.pickling import UnreadableError, dump, load
from dagrl.runtime.edges.ring import Ring
from tests.unit.runtime.unreadable import unreadable

HEADER = Header("phase", 7, True, {"train": (1, 2)}, 10.0)
FAILURE = WorkerFailure("train", 1, "dp 1", "here", 3, "phase", 7, "train[1].step", "raised", "ValueError", "stack", 5)
NEWER = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32"]


@dataclass
class Holding:
    tensor: torch.Tensor


@pytest.mark.parametrize("size", [0, 10, 100_000], ids=["alone", "with an array", "with one out of band"])
def test_a_message_that_cannot_be_unpickled_keeps_its_header_and_failures(size: int) -> None:
    packet = Packet(HEADER, [unreadable(), np.zeros(size)] if size else unreadable(), 0.5, (FAILURE,))
    parts = dump(packet.wire())
    with pytest.raises(UnreadableError, match="ValueError: cannot be made again, when a value was unpickled") as caught:
        load(parts[0], parts[1:])
    found = Packet.from_wire(caught.value.content)
    assert (found.header, found.busy_s, found.failures) == (HEADER, 0.5, (FAILURE,))


def test_a_class_that_the_reader_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(Packet(HEADER, Holding(torch.zeros(2))).wire())
    monkeypatch.delattr("tests.unit.runtime.test_pickling.Holding")
    with pytest.raises(UnreadableError, match="AttributeError: Can't get attribute 'Holding'"):
        load(pickled)


def test_bytes_that_are_not_a_pickle_raise_their_own_error() -> None:
    with pytest.raises(pickle.UnpicklingError):
        load(b"\x80\x05nonsense")


@pytest.mark.parametrize("size", [0, 1000, 100_000], ids=["small", "copied", "in place"])
def test_a_ring_continues_after_a_message_that_cannot_be_unpickled(size: int) -> None:
    ring = Ring.create(1, 1 << 20, 1)
    reader = Ring.open(ring.address)
    for number in range(8):
        ring.write(dump((unreadable(), np.zeros(size))), 1.0)
        with pytest.raises(UnreadableError):
            reader.read(0, 1.0)
        ring.write(dump(number), 1.0)
        assert reader.read(0, 1.0) == number


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
        assert (one.dtype, one.shape, one.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(one.t().contiguous().view(torch.uint8), tensor.t().contiguous().view(torch.uint8))


RELAY = """
import torch
from dagrl.runtime.edges.pickling import dump, load
tensor = torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn)
assert load(dump(tensor)[0]).view(torch.uint8).tolist() == [0, 1, 2, 3]
"""


def test_a_process_that_has_sized_nothing_writes_readable_messages() -> None:
    """A relay is such a process: it passes on what it has read."""
    subprocess.run([sys.executable, "-c", RELAY], check=True, timeout=120)


def test_tensors_that_share_memory_still_share_it() -> None:
    whole = torch.arange(6).to(torch.uint16)
    payload_bytes(whole)
    left, right = load(dump((whole[:3], whole[3:]))[0])
    assert left.tolist() + right.tolist() == list(range(6))
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
