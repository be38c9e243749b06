"""Triton kernels of sampling: tokens by Gumbel noise, and their log-probabilities, in one pass over the logits.

Tokens are those of vLLM 0.26 (vllm/v1/worker/gpu/sample/gumbel.py), bit for bit. That kernel is bound by instructions: the
random bits of an element and two logarithms take 148. Here a product gives both of its halves, and only elements that an
upper bound of their noise leaves in the running have it computed. vLLM then scores tokens in three more passes (logprob.py
beside that), with one program a row. Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor
from triton.language.extra import libdevice  # type: ignore[import-not-found,unused-ignore]

TILE = 4096  # columns of a program
_WARPS = 4
_LEAST = tl.constexpr(4.6566127342e-10)  # above zero, of `tl.rand`
_LN_2_OF_BITS = tl.constexpr(0.6931471805599453 / (1 << 23))
_MOST = tl.constexpr(0.6931471805599453 * (127 + 31) + 1e-4)  # and more than rounding takes from a bound
_SLACK = tl.constexpr(1e-6)  # of large logits


def sampled_tokens(
    logits: Tensor, slots: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a token [n] int64 for each row of `logits` [n, size], and its log-probability [n, 1] float32.

    It has the largest logit, with Gumbel noise unless its temperature is 0. `temperatures` float32 and `seeds` int64 are
    those of requests, `slots` [n] int32 the request of each row, `positions` [n] int64 its place in the sequence. Logits are
    divided by temperatures already.
    """
    tokens = torch.empty_like(positions)
    return tokens, sampled_scores(logits, tokens, slots, temperatures, seeds, positions)


def sampled_scores(logits: Tensor, tokens: Tensor, *state: Tensor) -> Tensor:
    """Returns the log-probability [n, 1] float32 of each row's token in `logits` [n, size]. `tokens` is [n] int64.

    With the `state` of requests, as in `sampled_tokens`, tokens are drawn first.
    """
    rows, size = logits.shape
    tiles, draws = triton.cdiv(size, TILE), bool(state)
    tops, highest, sums = logits.new_empty(3, rows, tiles, dtype=torch.float32)
    chosen, logprobs = logits.new_empty(rows, tiles, dtype=torch.int32), logits.new_empty(rows, 1, dtype=torch.float32)
    found, parts = (tops, highest, sums, chosen), triton.next_power_of_2(tiles)
    state = state or (tokens,) * 4  # of which nothing is read
    _tiles[(rows, tiles)](logits, *state, *found, size, logits.stride(0), TILE=TILE, DRAWS=draws, num_warps=_WARPS)
    _rows[(rows,)](logits, *found, tokens, logprobs, tiles, logits.stride(0), TILES=parts, DRAWS=draws, num_warps=1)
    return logprobs


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tiles(  # type: ignore[no-untyped-def]
    logits, slots, temperatures, seeds, positions, tops, highest, sums, chosen, size, stride,
    TILE: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """The token of a tile of a row and its logit with noise, the first of equal ones; maximum and sum of exponentials."""
    row, first, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE, tl.arange(0, TILE)
    tile = row * tl.num_programs(1) + tl.program_id(1)
    logits += row * stride
    here = first + column < size
    values = tl.load(logits + first + column, mask=here, other=float("-inf")).to(tl.float32)
    high = tl.max(values, 0)
    tl.store(highest + tile, high)
    tl.store(sums + tile, tl.sum(tl.exp(values - tl.where(high == float("-inf"), 0.0, high)), 0))
    if DRAWS:
        slot = tl.load(slots + row)
        if tl.load(temperatures + slot, mask=slot >= 0, other=0.0) == 0.0:
            best = high
            token = tl.min(tl.where((values == high) & here, column, TILE), 0) % TILE  # the first one if all are NaN
        else:
            seed = tl.randint(tl.load(seeds + slot), tl.load(positions + row))
            exponents = _random(seed, first + column).to(tl.int32, bitcast=True).to(tl.float32)  # and linear between them
            bounds = values - exponents * _LN_2_OF_BITS  # and `_MOST`
            top, best, token = tl.max(bounds, 0), tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
            while (top > float("-inf")) & (top + _MOST + _SLACK * tl.abs(top) >= best):
                place = tl.min(tl.where(bounds == top, column, TILE), 0)
                draw = tl.maximum(_random(seed, first + place) * _LEAST, _LEAST)
                value = tl.load(logits + first + place).to(tl.float32) + _noise(draw)
                if (value > best) | ((value == best) & (place < token)):
                    best, token = value, place
                bounds = tl.where(column == place, float("-inf"), bounds)
                top = tl.max(bounds, 0)
        tl.store(tops + tile, best)
        tl.store(chosen + tile, first + token)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _noise(draw):  # type: ignore[no-untyped-def]
    """Gumbel noise of a number between 0 and 1, as vLLM computes it. At most -log(draw), as -log1p(-x) is at least x."""
    return -tl.log(-libdevice.log1p(-draw))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _random(seed, at):  # type: ignore[no-untyped-def]
    """`tl.rand(seed, at) / _LEAST` for a seed of 32 bits: a word of Philox (Salmon et al. 2011), without its sign.

    With a key of 0 that it knew, the compiler would make half of the products 64 bits wide, with twice the registers.
    """
    a, b, c, d = at.to(tl.uint32), at.to(tl.uint32) * 0, at.to(tl.uint32) * 0, at.to(tl.uint32) * 0
    key, other = seed.to(tl.uint32), (tl.num_programs(2) - 1).to(tl.uint32)  # zero, unknown to the compiler
    for _ in tl.static_range(10):
        even, odd = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, c = (odd >> 32).to(tl.uint32) ^ b ^ key, (even >> 32).to(tl.uint32) ^ d ^ other
        b, d = odd.to(tl.uint32), even.to(tl.uint32)
        key, other = key + 0x9E3779B9, other + 0xBB67AE85
    word = a.to(tl.int32, bitcast=True)
    return (word ^ (word >> 31)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rows(  # type: ignore[no-untyped-def]
    logits, tops, highest, sums, chosen, tokens, logprobs, tiles, stride, TILES: tl.constexpr, DRAWS: tl.constexpr
):
    """Joins the tiles of a row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    at, here = row * tiles + tile, tile < tiles
    if DRAWS:
        place = tl.max(tl.load(tops + at, mask=here, other=float("-inf")), 0, return_indices=True)[1]
        token = tl.load(chosen + row * tiles + tl.minimum(place, tiles - 1)).to(tl.int64)
        tl.store(tokens + row, token)
    else:
        token = tl.load(tokens + row)
    high = tl.load(highest + at, mask=here, other=float("-inf"))
    top = tl.max(high, 0)
    total = tl.sum(tl.load(sums + at, mask=here, other=0.0) * tl.exp(high - top), 0)
    tl.store(logprobs + row, tl.load(logits + row * stride + token).to(tl.float32) - top - tl.log(total))
