"""Where kernels are tested: on a GPU, or by Triton's interpreter on the CPU (`make test-extras`)."""

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

kernel_tests = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or Triton's interpreter: make test-extras"
    ),
]

rounds_fp8 = pytest.mark.skipif(INTERPRETED, reason="the interpreter of Triton 3.6 loses carries when it rounds to FP8")


def exact_in_fp8(shape: tuple[int, ...], form: torch.dtype, seed: int) -> Tensor:
    """Normal numbers of an FP8 format in float32, the largest one among them, so that the scale is 1 and none is rounded."""
    generator = torch.Generator().manual_seed(seed)
    largest = torch.finfo(form).max
    numbers = torch.randn(shape, generator=generator).sign() * torch.exp2(torch.randint(-4, 6, shape, generator=generator))
    numbers *= 1 + torch.randint(0, 4, shape, generator=generator) / 4  # two bits, which both formats have
    numbers.view(-1)[0] = largest
    return numbers


def large(*values: object) -> object:
    """Returns a case of many programs, for which the interpreter would take minutes."""
    return pytest.param(*values, marks=pytest.mark.skipif(INTERPRETED, reason="takes the interpreter minutes"))
