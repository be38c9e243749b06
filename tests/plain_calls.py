"""What tests of the baseline's refit call on workers, with and without GPUs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def scale_weights(worker: Any) -> None:
    """Weights that no refit has carried before."""
    import torch

    with torch.no_grad():
        for tensor in worker.weight_tensors().values():
            tensor.mul_(1.5)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def digests(worker: Any) -> Mapping[str, str]:
    """Of the bytes of every tensor that a generation worker reads."""
    import torch

    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, tensor in worker.weight_tensors().items()
    }
