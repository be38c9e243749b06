"""A Triton kernel that adds gradients in half precision to float32 sums. Imported only where Triton is.

torch's kernel for two dtypes loads number by number, and reaches a third to a half of the memory's rate.
"""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

BLOCK = 4096
"""Numbers that a program adds."""


def add_gradient(total: Tensor | None, grad: Tensor) -> Tensor:
    """Adds the contiguous `grad` to the contiguous float32 `total`, or returns it in float32 if there is none yet."""
    begins = total is None
    total = torch.empty_like(grad, dtype=torch.float32) if total is None else total
    if count := grad.numel():
        _add_kernel[(triton.cdiv(count, BLOCK),)](total, grad, count, begins, BLOCK, num_warps=8)
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_kernel(total, grad, count, begins: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if not begins:
        value += tl.load(total + at, mask=inside, other=0.0)
    tl.store(total + at, value, mask=inside)
