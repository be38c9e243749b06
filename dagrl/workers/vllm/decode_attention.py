"""Triton attention of decode steps: one query a sequence, keys and values in pages of vLLM's KV cache.

FlashAttention 3 pads a sequence's few queries of a KV head to 64 rows and copies pages of 16 tokens line by line. On an
H200, 256 sequences of 400 tokens with 16 heads take it 146 us a layer, and this kernel 107 us (3.9 TB/s). A few sequences,
or long ones, take as long.

Here a program has 16 rows, and several of them share a processor. It reads a part of a sequence for one KV head. Long
sequences and small batches have several parts, which a second kernel joins (Flash-Decoding). Sequences next to each other
that share a prefix read it from the L2 cache. Imported only where Triton is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

LOG2_E = 1.4426950408889634
HEAD_SIZES = (64, 128)
MOST_QUERIES = 16
"""Queries of a KV head that a program has rows for."""

NEEDED = frozenset("q k v out block_table seqused_k softmax_scale max_seqlen_q max_seqlen_k".split())
PLAIN = NEEDED | frozenset(
    "cu_seqlens_q causal window_size scheduler_metadata num_splits fa_version q_descale k_descale v_descale".split()
)
"""Arguments of `flash_attn_varlen_func` that ask for nothing else here; descales are those of FP8."""

TILE = 64  # tokens that a program reads at once
_WARPS, _STAGES = 2, 5
AT_ONCE = 132 * 4
"""Programs that run at once with a stage less: by shared memory, with `_STAGES`, a processor has three. Then two turns would
be needed, and 64 sequences of 420 tokens take 38 us a layer instead of 31."""

UNITS = 132 * 8
"""Programs that balance a GPU's work, where their parts are long."""

FEWEST = 512
"""Programs that keep a GPU busy. More of them would have parts as short as the start of a program takes."""

LONGEST_PART = 2048  # tokens of a part, where sequences may be longer

MOST_PARTS = 32
_STEP = tl.constexpr(16)  # parts are multiples of this many tokens
_COUNTED = tl.constexpr(1024)  # sequences that a program counts the tokens of at once
_SHORTEST = tl.constexpr(128)  # fewest tokens of a part, unless the sequence is shorter
_LONG = tl.constexpr(512)  # tokens of a part that make more than `FEWEST` programs worth while


def decode_attention(
    queries: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, scale: float, longest: int, out: Tensor
) -> Tensor:
    """Writes softmax(scale q k) v to `out` [sequences, heads, D], and returns it. Sequences of length 0 have zeros.

    `queries` is [sequences, heads, D]; `keys` and `values` are [pages, page size, KV heads, D] with equal strides. `pages`
    [sequences, n] int32 are the pages of each sequence, `lengths` [sequences] int32 at most `longest`.
    """
    count, heads, size = queries.shape
    page, groups = keys.shape[1], keys.shape[2]
    parts = most_parts(count * groups, longest)
    state = queries.new_empty((count, heads, parts, size + 2) if parts > 1 else 1, dtype=torch.float32)
    strides = pages.stride(0), *keys.stride()[:3], queries.stride(0), queries.stride(1), out.stride(0), out.stride(1)
    rows, schedule = max(16, triton.next_power_of_2(heads // groups)), (count, parts, UNITS, FEWEST)
    stages = _STAGES - (groups * count * parts <= AT_ONCE)
    _attend[(groups, count, parts)](
        *(queries, keys, values, pages, lengths, out, state, scale * LOG2_E, *schedule, *strides, heads // groups, rows),
        **{"PAGE": page, "TILE": TILE, "D": size, "SPLIT": parts > 1, "num_warps": _WARPS, "num_stages": stages},
    )
    if parts > 1:
        outer = groups, out.stride(0), out.stride(1)
        _join[(heads, count)](lengths, out, state, *schedule, *outer, D=size, PARTS=MOST_PARTS, num_warps=1)
    return out


def takes(call: Mapping[str, Any]) -> bool:
    """Whether `decode_attention` computes what this call of `flash_attn_varlen_func` asks for."""
    if any(call.get(name) is None for name in NEEDED):
        return False
    q, k, pages = call["q"], call["k"], call["block_table"]
    return bool(
        call["max_seqlen_q"] == 1
        and len(q) == len(pages) == len(call["seqused_k"])
        and call.get("causal") is True
        and tuple(call.get("window_size") or (-1, -1)) == (-1, -1)
        and not any(isinstance(call[name], torch.Tensor) or call[name] for name in call.keys() - PLAIN)
        and q.dtype == k.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in HEAD_SIZES
        and q.shape[1] // k.shape[2] <= MOST_QUERIES
        and k.stride() == call["v"].stride()
    )


def most_parts(programs: int, longest: int) -> int:
    """Returns the most parts of a sequence, where all sequences in one part each are `programs` programs."""
    parts = max(triton.cdiv(FEWEST, programs), triton.cdiv(longest, LONGEST_PART))
    return int(min(parts, MOST_PARTS, triton.cdiv(longest, _SHORTEST.value)))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _part(length, lengths, count, parts, units, fewest, groups):  # type: ignore[no-untyped-def]
    """The tokens of a part of a sequence: so many that all parts of all sequences are `fewest` programs, or few more.

    They are `units` programs where parts are long.
    """
    totals = tl.zeros([_COUNTED], tl.int32)
    for start in range(0, count, _COUNTED):
        at = start + tl.arange(0, _COUNTED)
        totals += tl.load(lengths + at, mask=at < count, other=0)
    total = tl.sum(totals, 0) * groups
    wanted = tl.maximum(tl.cdiv(total, units), tl.maximum(tl.minimum(tl.cdiv(total, fewest), _LONG), _SHORTEST))
    parts = tl.minimum(tl.cdiv(length, wanted), parts)
    return tl.cdiv(tl.cdiv(length, tl.maximum(parts, 1)), _STEP) * _STEP


@triton.jit(do_not_specialize=["count", "parts", "units", "fewest"])  # type: ignore[untyped-decorator,unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    queries, keys, values, pages, lengths, out, state, scale, count, parts, units, fewest,
    pages_stride, page_stride, token_stride, group_stride, query_stride, head_stride, out_stride, out_head_stride,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    group, part = tl.program_id(0), tl.program_id(2)
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    begin, end = 0, length
    if SPLIT:
        tokens = _part(length, lengths, count, parts, units, fewest, tl.num_programs(0))
        begin = part * tokens
        end = tl.minimum(begin + tokens, length)
        if (begin >= length) & (part > 0):
            return
    row, d, n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    head = group * QUERIES + row
    live = row[:, None] < QUERIES
    q = tl.load(queries + sequence * query_stride + head[:, None] * head_stride + d[None, :], mask=live, other=0.0)
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for start in tl.range(begin, end, TILE):
        token = start + n
        here = token < end
        page = tl.load(pages + sequence * pages_stride + token // PAGE, mask=here, other=0).to(tl.int64)
        at = page * page_stride + (token % PAGE) * token_stride + group * group_stride
        k = tl.load(keys + at[None, :] + d[:, None], mask=here[None, :], other=0.0)
        v = tl.load(values + at[:, None] + d[None, :], mask=here[:, None], other=0.0)
        scores = tl.where(here[None, :], tl.dot(q, k) * scale, -1.0e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = higher
    if SPLIT and (begin > 0 or end < length):
        at = ((sequence * tl.num_programs(0) * QUERIES + head) * parts + part) * (D + 2)
        tl.store(state + at[:, None] + d[None, :], sums, mask=live)
        tl.store(state + at + D, top, mask=row < QUERIES)
        tl.store(state + at + D + 1, total, mask=row < QUERIES)
    else:
        attended = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + sequence * out_stride + head[:, None] * out_head_stride + d[None, :], attended, mask=live)


@triton.jit(do_not_specialize=["count", "parts", "units", "fewest", "groups"])  # type: ignore[untyped-decorator,unused-ignore]
def _join(  # type: ignore[no-untyped-def]
    lengths, out, state, count, parts, units, fewest, groups, out_stride, out_head_stride,
    D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one head of a sequence, if it has several."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    tokens = _part(length, lengths, count, parts, units, fewest, groups)
    if tokens >= length:
        return
    part, d = tl.arange(0, PARTS), tl.arange(0, D)
    here = part * tokens < length
    at = ((sequence * tl.num_programs(0) + head) * parts + part) * (D + 2)
    tops = tl.load(state + at + D, mask=here, other=-1.0e30)
    shrink = tl.exp2(tops - tl.max(tops, 0))
    total = tl.sum(tl.load(state + at + D + 1, mask=here, other=0.0) * shrink, 0)
    sums = tl.load(state + at[:, None] + d[None, :], mask=here[:, None], other=0.0)
    tl.store(out + sequence * out_stride + head * out_head_stride + d, tl.sum(sums * shrink[:, None], 0) / total)
