"""Tensors on edges: their size against the real pickle, and what cannot be sent from GPU to GPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.errors import RunError
from dagrl.runtime.edges.packet import payload_bytes
from dagrl.runtime.edges.pickling import accelerator_tensors, dump
from dagrl.telemetry.metrics import StepMetrics

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


def test_tensors_are_found_in_containers_and_those_on_the_cpu_stay_in_the_packet() -> None:
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
def test_tensors_that_would_arrive_wrong_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        accelerator_tensors(make())
