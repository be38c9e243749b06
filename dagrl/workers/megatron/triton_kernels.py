"""Triton kernels of Megatron's layers: rotary embedding, RMSNorm and SwiGLU, forward and backward; sums over experts.

In plain torch each takes up to a dozen passes over memory; here, as in Transformer Engine, one. All compute in float32 and
round once. `use_layer_kernels` installs the rotary embedding and SwiGLU in place of Megatron's fused ones, which need
Transformer Engine or compilation. Imported only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

BLOCK_ELEMENTS = 4096  # elements of a tile: rows times padded row length
SWIGLU_BLOCK = 1024  # columns that a program of SwiGLU reads at once
NORM_PROGRAMS = 1024  # programs that each sum the weight gradient over their rows
SUM_BLOCK = 1024  # columns that a program sums over experts
ZERO_BLOCK = 4096  # elements that a program fills with zeros


def use_layer_kernels(config: Any) -> None:
    """Makes models built with this Megatron configuration use our rotary and SwiGLU kernels."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import mlp

    rope_utils.fused_apply_rotary_pos_emb = rotate
    config.apply_rope_fusion = True
    mlp.bias_swiglu_impl = lambda states, _, *options: swiglu(states)  # linear layers of MLPs have no bias
    mlp.weighted_bias_swiglu_impl = lambda states, _, weights, *options: swiglu(states, weights)
    config.bias_activation_fusion = True


def swiglu(states: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns silu(a) * b for `states` [..., 2 d], whose first half is a and second half b, times `weights` [..., 1]."""
    activated: Tensor = _Swiglu.apply(states, weights)  # type: ignore[no-untyped-call]
    return activated


def rotate(states: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the first r numbers of `states` [s, b, heads, d], pairs of both halves, by `angles` [s, 1, 1, r] float32."""
    assert not interleaved, "rotary_interleaved is never set"
    rotated: Tensor = _Rotate.apply(states, angles)  # type: ignore[no-untyped-call]
    return rotated


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides `states` [..., d] by their root mean square and multiplies by `weight` [d]."""
    normed: Tensor = _RmsNorm.apply(states, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _rotated(states, angles, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _rotated(grads[0], ctx.saved_tensors[0], -1.0), None


def _rotated(states: Tensor, angles: Tensor, direction: float) -> Tensor:
    states = states if states.stride(3) == 1 else states.contiguous()
    (length, batch, heads, size), width = states.shape, angles.shape[-1]
    rotated = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    strides = states.stride(0), states.stride(1), states.stride(2)
    half = triton.next_power_of_2(width // 2)
    sizes = heads, triton.next_power_of_2(heads), width // 2, half, size
    _rotate_kernel[(length * batch,)](states, angles, rotated, batch, *strides, angles.stride(0), direction, *sizes)
    if width < size:
        rotated[..., width:] = states[..., width:]
    return rotated


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    states,
    angles,
    rotated,
    batch,
    stride_s,
    stride_b,
    stride_h,
    stride_angle,
    direction,
    heads: tl.constexpr,
    heads_block: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    size: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    head = tl.arange(0, heads_block)[:, None]
    column = tl.arange(0, half_block)[None, :]
    inside = (head < heads) & (column < half)
    angle = tl.load(angles + position * stride_angle + column, mask=column < half, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle) * direction
    source = states + position * stride_s + (token % batch) * stride_b + head * stride_h + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = rotated + (token * heads + head) * size + column
    tl.store(target, (first * cos - second * sin).to(rotated.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * cos + first * sin).to(rotated.dtype.element_ty), mask=inside)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor | None) -> Tensor:
        states = states.contiguous()
        factors = states if weights is None else weights.contiguous()  # the kernel does not read factors without weights
        ctx.save_for_backward(states, factors)
        ctx.weighted = weights is not None
        activated = torch.empty(*states.shape[:-1], states.shape[-1] // 2, dtype=states.dtype, device=states.device)
        if states.numel():
            _swiglu_kernel[_rows(states)](states, factors, activated, activated.shape[-1], ctx.weighted, SWIGLU_BLOCK)
        return activated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        states, factors = ctx.saved_tensors
        grad_states, grad_factors = torch.empty_like(states), torch.empty_like(factors) if ctx.weighted else states
        if states.numel():
            tensors = states, factors, grads[0].contiguous(), grad_states, grad_factors
            _swiglu_backward_kernel[_rows(states)](*tensors, states.shape[-1] // 2, ctx.weighted, SWIGLU_BLOCK)
        return grad_states, grad_factors if ctx.weighted else None


def _rows(states: Tensor) -> tuple[int]:
    return (states.numel() // states.shape[-1],)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    states, weights, activated, half: tl.constexpr, weighted: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(weights + row).to(tl.float32) if weighted else 1.0
    for start in range(0, half, block):
        column = start + tl.arange(0, block)
        inside, source = column < half, states + row * (2 * half) + column
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * linear * factor
        tl.store(activated + row * half + column, value.to(activated.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    states, weights, grad, grad_states, grad_weights, half: tl.constexpr, weighted: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(weights + row).to(tl.float32) if weighted else 1.0
    total = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, half, block):
        column = start + tl.arange(0, block)
        inside, place = column < half, row * (2 * half) + column
        gate = tl.load(states + place, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(states + place + half, mask=inside, other=0.0).to(tl.float32)
        upper = tl.load(grad + row * half + column, mask=inside, other=0.0).to(tl.float32)
        open_share = tl.sigmoid(gate)
        total += upper * gate * open_share * linear
        upper *= factor
        of_gate = upper * linear * open_share * (1.0 + gate * (1.0 - open_share))
        tl.store(grad_states + place, of_gate.to(grad_states.dtype.element_ty), mask=inside)
        tl.store(grad_states + place + half, (upper * gate * open_share).to(grad_states.dtype.element_ty), mask=inside)
    if weighted:
        tl.store(grad_weights + row, tl.sum(total, axis=0).to(grad_weights.dtype.element_ty))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        rows, width = flat.shape
        normed = torch.empty_like(flat, memory_format=torch.contiguous_format)
        scale = torch.empty(rows, dtype=torch.float32, device=flat.device)
        block = triton.next_power_of_2(width)
        tile = max(1, BLOCK_ELEMENTS // block)
        _norm_kernel[(triton.cdiv(rows, tile),)](flat, weight, normed, scale, rows, flat.stride(0), eps, width, block, tile)
        ctx.save_for_backward(flat, weight, scale)
        return normed.view(states.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        flat, weight, scale = ctx.saved_tensors
        rows, width = flat.shape
        grad = grads[0].reshape(rows, width)
        block = triton.next_power_of_2(width)
        tile = max(1, BLOCK_ELEMENTS // 2 // block)
        programs = min(NORM_PROGRAMS, triton.cdiv(rows, tile))
        grad_flat = torch.empty_like(flat, memory_format=torch.contiguous_format)
        parts = torch.empty(programs, width, dtype=torch.float32, device=flat.device)
        turns = triton.cdiv(rows, tile * programs)
        tensors, strides = (flat, weight, scale, grad, grad_flat, parts), (flat.stride(0), grad.stride(0))
        _norm_backward_kernel[(programs,)](*tensors, rows, *strides, width, block, tile, turns)
        return grad_flat.view(grads[0].shape), parts.sum(0).to(weight.dtype), None


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_kernel(  # type: ignore[no-untyped-def]
    states, weight, normed, scale, rows, stride, eps, width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.arange(0, block)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(states + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(scale + row, factor, mask=row < rows)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    result = value * factor[:, None] * gain[None, :]
    tl.store(normed + row[:, None] * width + column[None, :], result.to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    states,
    weight,
    scale,
    grad,
    grad_states,
    parts,
    rows,
    stride,
    grad_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    turns,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((block,), dtype=tl.float32)
    for turn in range(turns):
        row = (program * turns + turn) * tile + tl.arange(0, tile)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(states + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        upper = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(scale + row, mask=row < rows, other=0.0)
        unit = value * factor[:, None]
        total += tl.sum(upper * unit, axis=0)
        scaled = upper * gain[None, :]
        mean = tl.sum(scaled * unit, axis=1) / width
        result = (scaled - unit * mean[:, None]) * factor[:, None]
        target = grad_states + row[:, None] * width + column[None, :]
        tl.store(target, result.to(grad_states.dtype.element_ty), mask=inside)
    tl.store(parts + program * width + column, total, mask=column < width)


def sum_rows_on_gpu(states: Tensor, rows: Tensor) -> Tensor:
    """Sums the `rows` [tokens, k] of `states` [n, width] in float32 for each token -> [tokens, width]."""
    (tokens, chosen), width = rows.shape, states.shape[1]
    total = states.new_empty(tokens, width)
    block = min(SUM_BLOCK, triton.next_power_of_2(width))
    if tokens:
        _sum_kernel[(tokens, triton.cdiv(width, block))](states, rows, total, width, chosen, block)
    return total


def clear_empty(matrices: Tensor, offsets: Tensor) -> None:
    """Fills the matrices [experts, n, m] of experts without rows with zeros. Rows of experts end at `offsets` [experts]."""
    elements = matrices[0].numel()
    _clear_kernel[(len(matrices), triton.cdiv(elements, ZERO_BLOCK))](matrices, offsets, elements, ZERO_BLOCK)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_kernel(states, rows, total, width, chosen: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    sums = tl.zeros((block,), dtype=tl.float32)
    for number in tl.static_range(chosen):
        row = tl.load(rows + token * chosen + number)
        sums += tl.load(states + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + token * width + column, sums.to(total.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _clear_kernel(matrices, offsets, elements, block: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    if start == tl.load(offsets + expert):
        at = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
        zeros = tl.zeros((block,), dtype=matrices.dtype.element_ty)
        tl.store(matrices + expert.to(tl.int64) * elements + at, zeros, mask=at < elements)
