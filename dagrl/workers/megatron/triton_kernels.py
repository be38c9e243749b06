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
HEAD_PROGRAMS = 4096  # programs that each sum the weight gradients of heads' norms over their tokens
HEAD_WARPS, HEAD_STAGES = 4, 2  # of each such program; stages: loads of so many tokens are under way at once
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


def split_heads(mixed: Tensor, norms: tuple[Tensor, Tensor], eps: float, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits `mixed` [s, b, groups, (r + 2) d]: r queries, a key and a value of d numbers in each group.

    Returns queries [s, b, groups r, d] and keys [s, b, groups, d], normalized with the weights `norms` [d] and rotated by
    `angles` [s, 1, 1, d], rounded once, and the values.
    """
    heads: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(mixed, *norms, eps, angles)  # type: ignore[no-untyped-call]
    return heads


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


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, query_norm: Tensor, key_norm: Tensor, eps: float, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, size = mixed.contiguous(), len(query_norm)
        (length, batch, groups, width), ctx.eps = mixed.shape, eps
        queries = mixed.new_empty(length, batch, groups * (width // size - 2), size)
        keys = mixed.new_empty(length, batch, groups, size)
        values = mixed.detach().view(length, batch, groups, -1, size)[..., -1, :]  # a view: saved with `mixed`, never copied
        ctx.save_for_backward(mixed, query_norm, key_norm, angles)
        write_heads((mixed, query_norm, key_norm, angles), (queries, keys), eps)
        return queries, keys, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        inputs = ctx.saved_tensors  # once, as recomputed ones are freed
        grad, of_norms = heads_gradients(inputs, grads, ctx.eps)
        of_queries, of_keys = of_norms.to(inputs[1].dtype)
        return grad, of_queries, of_keys, None, None


def write_heads(inputs: tuple[Tensor, ...], heads: tuple[Tensor, Tensor], eps: float) -> None:
    """Writes queries and keys, as `split_heads` returns them.

    `inputs`: mixed [s, b, groups, (r + 2) d], both norms, and angles. Of transformers' layers cosines and sines [rows, d] in
    place of angles: then a token has all queries before all keys and values, and the tokens [s b] take the rows in turn.
    """
    _run_heads(inputs, (*heads, heads[1]), inputs[0], inputs[0], eps, backward=False)


def heads_gradients(inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of mixed and, in float32, of both norms [2, d], from those of queries, keys and values."""
    heads = tuple(grad if grad.stride(3) == 1 else grad.contiguous() for grad in grads)
    grad, size = torch.empty_like(inputs[0]), len(inputs[1])
    parts = torch.empty(HEAD_PROGRAMS, 2, size, device=grad.device)
    _run_heads(inputs, heads, grad, parts, eps, backward=True)
    return grad, parts.sum(0)


def _run_heads(
    inputs: tuple[Tensor, ...], heads: tuple[Tensor, ...], grad: Tensor, parts: Tensor, eps: float, *, backward: bool
) -> None:
    mixed, query_norm, key_norm, angles, *sines = inputs
    (length, batch, groups, width), size = mixed.shape, len(query_norm)
    strides = *(stride for head in heads for stride in head.stride()[:3]), angles.stride(0)
    blocks = triton.next_power_of_2(groups), size // 2, triton.next_power_of_2(size // 2)
    sizes = length * batch, batch, *strides, eps, len(angles), groups, width // size - 2, *blocks
    tensors = mixed, query_norm, key_norm, angles, *(sines or [angles]), *heads, grad, parts
    _heads_kernel[(HEAD_PROGRAMS,)](*tensors, *sizes, HEAD_STAGES, backward, bool(sines), num_warps=HEAD_WARPS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _heads_kernel(  # type: ignore[no-untyped-def]
    mixed,
    query_norm,
    key_norm,
    angles,
    sines,
    queries,
    keys,
    values,
    grad,
    parts,
    tokens,
    batch,
    query_s,
    query_b,
    query_h,
    key_s,
    key_b,
    key_h,
    value_s,
    value_b,
    value_h,
    stride_angle,
    eps,
    angle_rows,
    groups: tl.constexpr,
    ratio: tl.constexpr,
    block: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    stages: tl.constexpr,
    backward: tl.constexpr,
    tables: tl.constexpr,
):
    """Writes `queries` and `keys`; with `backward` reads their and `values`' gradients, and writes `grad` and `parts`.

    A program takes consecutive tokens, whose next loads it has under way, and of a token one head of every group at a time.
    """
    column, size = tl.arange(0, half_block)[None, :], 2 * half
    real, group = column < half, tl.arange(0, block).to(tl.int64)[:, None]
    here = real & (group < groups)
    query_1 = tl.load(query_norm + column, mask=real, other=0.0).to(tl.float32)
    query_2 = tl.load(query_norm + half + column, mask=real, other=0.0).to(tl.float32)
    key_1 = tl.load(key_norm + column, mask=real, other=0.0).to(tl.float32)
    key_2 = tl.load(key_norm + half + column, mask=real, other=0.0).to(tl.float32)
    total_1, total_2 = tl.zeros((block, half_block), tl.float32), tl.zeros((block, half_block), tl.float32)
    total_3, total_4 = tl.zeros((block, half_block), tl.float32), tl.zeros((block, half_block), tl.float32)
    cos, sin = tl.zeros((1, half_block), tl.float32), tl.zeros((1, half_block), tl.float32)
    turns = tl.cdiv(tokens, tl.num_programs(0))
    begin = tl.program_id(0) * turns
    for token in tl.range(begin, tl.minimum(begin + turns, tokens), num_stages=stages):
        position, row = tl.cast(token // batch, tl.int64), tl.cast(token % batch, tl.int64)
        place = tl.cast(token, tl.int64) * (groups * (ratio + 2) * size) + column
        if tables:  # cosines and sines, and transformers' order of heads
            of_query, of_key = place + group * (ratio * size), place + (groups * ratio + group) * size
            of_value, at = of_key + groups * size, token % angle_rows * stride_angle + column
            cos = tl.load(angles + at, mask=real, other=0.0).to(tl.float32)
            sin = tl.load(sines + at, mask=real, other=0.0).to(tl.float32)
        else:
            of_query = place + group * ((ratio + 2) * size)
            of_key, of_value = of_query + ratio * size, of_query + (ratio + 1) * size
            if (token == begin) | (token % batch == 0):
                angle = tl.load(angles + position * stride_angle + column, mask=real, other=0.0)
                cos, sin = tl.cos(angle), tl.sin(angle)
        for slot in tl.static_range(ratio + 1):
            if slot < ratio:
                head = queries + position * query_s + row * query_b + (group * ratio + slot) * query_h + column
                at, gain_1, gain_2 = of_query + slot * size, query_1, query_2
            else:
                head = keys + position * key_s + row * key_b + group * key_h + column
                at, gain_1, gain_2 = of_key, key_1, key_2
            first = tl.load(mixed + at, mask=here, other=0.0).to(tl.float32)
            second = tl.load(mixed + at + half, mask=here, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / size + eps)[:, None]
            unit_1, unit_2 = first * scale, second * scale
            if backward:
                upper_1 = tl.load(head, mask=here, other=0.0).to(tl.float32)
                upper_2 = tl.load(head + half, mask=here, other=0.0).to(tl.float32)
                turned_1, turned_2 = upper_1 * cos + upper_2 * sin, upper_2 * cos - upper_1 * sin
                if slot < ratio:
                    total_1 += turned_1 * unit_1
                    total_2 += turned_2 * unit_2
                else:
                    total_3 += turned_1 * unit_1
                    total_4 += turned_2 * unit_2
                scaled_1, scaled_2 = turned_1 * gain_1, turned_2 * gain_2
                mean = tl.sum(scaled_1 * unit_1 + scaled_2 * unit_2, axis=1)[:, None] / size
                tl.store(grad + at, ((scaled_1 - unit_1 * mean) * scale).to(grad.dtype.element_ty), mask=here)
                tl.store(grad + at + half, ((scaled_2 - unit_2 * mean) * scale).to(grad.dtype.element_ty), mask=here)
            else:
                normed_1, normed_2 = unit_1 * gain_1, unit_2 * gain_2
                tl.store(head, (normed_1 * cos - normed_2 * sin).to(head.dtype.element_ty), mask=here)
                tl.store(head + half, (normed_2 * cos + normed_1 * sin).to(head.dtype.element_ty), mask=here)
        if backward:
            value = values + position * value_s + row * value_b + group * value_h + column
            tl.store(grad + of_value, tl.load(value, mask=here), mask=here)
            tl.store(grad + of_value + half, tl.load(value + half, mask=here), mask=here)
    if backward:
        part, inside = parts + tl.program_id(0) * (2 * size) + tl.arange(0, half_block), tl.arange(0, half_block) < half
        tl.store(part, tl.sum(total_1, axis=0), mask=inside)
        tl.store(part + half, tl.sum(total_2, axis=0), mask=inside)
        tl.store(part + size, tl.sum(total_3, axis=0), mask=inside)
        tl.store(part + size + half, tl.sum(total_4, axis=0), mask=inside)


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
