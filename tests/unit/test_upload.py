"""Upload: what arrives is what was sent, whatever types and sizes lie side by side."""

from __future__ import annotations

import numpy as np
import torch

from workers.megatron.upload import upload


def test_arrays_arrive_with_their_types_and_shapes() -> None:
    generator = np.random.default_rng(0)
    sent = [
        generator.integers(0, 9, (3, 5)),
        generator.normal(size=7).astype(np.float32),
        generator.integers(0, 9, 1).astype(np.int32),
        np.zeros((2, 0), np.float32),
        generator.normal(size=(2, 3)),
        generator.integers(0, 2, 3).astype(np.bool_),
    ]
    arrived = upload(sent, torch.device("cpu"))
    for tensor, array in zip(arrived, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    arrived[0].zero_()
    np.testing.assert_array_equal(arrived[1].numpy(), sent[1])
    assert upload([], torch.device("cpu")) == []
