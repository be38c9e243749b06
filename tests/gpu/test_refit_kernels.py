"""Kernels of refits against torch, byte for byte: copies, checksums and blockwise FP8."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dagrl.refit.carry.verify import _COLUMNS, _UPPER, _WEIGHT, checksum, contiguous_bytes
from dagrl.refit.fp8 import BLOCK, quantize_blocks, scale_shape
from dagrl.refit.kernels.rows import SummedView, as_rows
from tests.gpu.kernels import DEVICE, INTERPRETED, exact_in_fp8, kernel_tests, rounds_fp8

pytest.importorskip("triton")
pytestmark = kernel_tests

LONG = 30 if INTERPRETED else 3000
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64]


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bit patterns, so that equality means equal bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=DEVICE).view(dtype).view(shape)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def pairs(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Targets and sources: strided, stacked, with odd sizes and offsets, empty, of one element."""
    whole = random((6, 96, 320), dtype)
    return [
        (random((6, 96, 160), dtype), whole[:, :, 160:]),  # columns
        (random((6, 192, 320), dtype)[:, 96:], whole),  # rows of a stack
        (random((96, 320), dtype), whole[3]),  # contiguous
        (random((5, 7, 9), dtype), whole[:5, 11:18, 3:12]),  # odd
        (random((1001,), dtype)[1:], random((1003,), dtype)[3:]),  # unaligned
        (random((7, 3), dtype)[::2], random((4, 3), dtype)),
        (random((), dtype), random((), dtype)),
        (random((0, 4), dtype), random((0, 4), dtype)),
        (random((LONG, 1024), dtype), random((LONG, 2048), dtype)[:, 512:1536]),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_copies_what_torch_copies(dtype: torch.dtype) -> None:
    from dagrl.refit.kernels.copy_kernel import CopyTable

    copied = pairs(dtype)
    rows = [as_rows(target, source) for target, source in copied]
    table = CopyTable([one for some in rows if some is not None for one in some], DEVICE)
    assert None not in rows
    for alone in (True, False):
        table.launch(alone)
        for target, source in copied:
            assert torch.equal(raw(target), raw(source)), (target.shape, target.stride())
        for _, source in copied:
            source.copy_(random(tuple(source.shape), dtype))


def test_numbers_are_cast_as_torch_casts_them() -> None:
    """From a view of rows, into a part of a merged tensor, and one vector. NaN stays NaN; what is narrow is torch's."""
    from dagrl.refit.kernels.copy_kernel import CopyTable

    merged, whole = torch.zeros((3, 96, 160), dtype=torch.bfloat16, device=DEVICE), torch.randn((7, 64, 320), device=DEVICE)
    whole[0, 0, :4] = torch.tensor([float("nan"), float("inf"), 1.00390625, -0.0])  # of both roundings the even one
    vector = torch.randn((LONG * 1000 // 8 * 8,), device=DEVICE)
    if INTERPRETED:  # by truncation
        whole, vector = whole.to(torch.bfloat16).float(), vector.to(torch.bfloat16).float()
    cast = [(merged[:, 32:], whole[:3, :, :160]), (torch.zeros_like(vector, dtype=torch.bfloat16), vector)]
    rows = [as_rows(target, source) for target, source in cast]
    CopyTable([one for some in rows if some is not None for one in some], DEVICE).launch(alone=True)
    assert None not in rows
    for target, source in cast:
        torch.testing.assert_close(target, source.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    assert not merged[:, :32].any()
    assert as_rows(merged[:, :, 4:], torch.zeros((3, 96, 156), device=DEVICE)) is None


def test_only_the_targets_are_written() -> None:
    from dagrl.refit.kernels.copy_kernel import CopyTable

    around, source = (
        torch.full(shape, fill, dtype=torch.uint8, device=DEVICE) for shape, fill in (((64, 4096), 7), ((57, 3983), 9))
    )
    rows = as_rows(around[3:60, 17:4000], source)
    assert rows is not None
    CopyTable(rows, DEVICE).launch(alone=True)
    expected = torch.full((64, 4096), 7, dtype=torch.uint8, device=DEVICE)
    expected[3:60, 17:4000] = 9
    assert torch.equal(around, expected)


@pytest.mark.parametrize("alone", [False, True])
def test_checksums_match_torch(alone: bool) -> None:
    """Whole vectors, strided views, several views with gaps between them, a transposed view."""
    from dagrl.refit.kernels.checksum_kernel import ChecksumTable

    sizes = (1, 3, 8, 64, 8 * 1024, 3 * 8 * 1024 + 7, 70_000, 12_288, *(() if INTERPRETED else (5 << 20,)))
    moves: list[list[SummedView]] = [[(0, random((size,), torch.uint8))] for size in sizes]
    moves.append([(0, random((640, 960), torch.bfloat16)[:, 320:640])])
    moves.append([(0, random((57, 300), torch.uint8)[3:, 5:298])])
    moves.append([(0, random((128, 128), torch.uint8)), (128 * 128, random((3,), torch.float32))])
    moves.append([(0, random((5,), torch.uint8)), (16, random((300_001,), torch.uint8)[1:])])
    moves.append([(0, random((640, 96), torch.bfloat16).t())])
    table = ChecksumTable(moves, _COLUMNS, _WEIGHT, _UPPER, alone)
    for _ in range(2):
        expected = [checksum(contiguous_bytes([(at, view.cpu()) for at, view in pieces])) for pieces in moves]
        assert torch.equal(table.launch().cpu(), torch.stack(expected))
        for (_, view), *_ in moves:
            view[len(view) // 2] += 4


def weights(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Blocks of very different magnitudes: one of zeros, one below the smallest peak, and negative zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = torch.randint(-18, 8, scale_shape(shape), generator=generator)
    spread = torch.exp2(exponents.float()).repeat_interleave(128, -2).repeat_interleave(128, -1)
    weight = torch.randn(shape, generator=generator) * spread[..., : shape[-2], : shape[-1]]
    weight[..., : min(128, shape[-2]), : min(128, shape[-1])] = -0.0
    return weight.to(dtype)


def exact_weights(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns blocks of numbers that FP8 has, each times a power of 2."""
    weight = torch.empty(shape, dtype=dtype)
    for number, matrix in enumerate(weight.flatten(0, -3) if weight.dim() > 2 else [weight]):
        for top in range(0, shape[-2], BLOCK):
            for left in range(0, shape[-1], BLOCK):
                block = matrix[top : top + BLOCK, left : left + BLOCK]
                numbers = exact_in_fp8(tuple(block.shape), torch.float8_e4m3fn, top + left + number)
                block.copy_(numbers * 2.0 ** ((top + left) // BLOCK % 5))
    return weight


@pytest.mark.parametrize("make", [exact_weights, pytest.param(weights, marks=rounds_fp8)], ids=["exact", "rounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_blocks_in_fp8_have_the_bytes_of_torch(
    dtype: torch.dtype, make: Callable[[tuple[int, ...], torch.dtype], Tensor]
) -> None:
    from dagrl.refit.kernels.quantize_kernel import BlockTable

    shapes: list[tuple[int, ...]] = [(256, 512), (100, 300), (1, 7), (128, 129), (3, 256, 384), (2, 2, 130, 128)]
    wide = make((512, 1024), dtype).to(DEVICE)
    sources = [*(make(shape, dtype).to(DEVICE) for shape in shapes), make((256, 128), dtype).to(DEVICE).t()]
    sources += [
        wide[128:400, 256:700],
        *([] if make is exact_weights else [wide[::2, ::4]]),
    ]  # other blocks' numbers are rounded
    places = [torch.empty(source.shape, dtype=torch.float8_e4m3fn, device=DEVICE) for source in sources]
    scales = [torch.empty(scale_shape(tuple(source.shape)), device=DEVICE) for source in sources]
    table = BlockTable(list(zip(sources, places, scales, strict=True)))
    for alone in (True, False):
        table.launch(alone)
    for source, place, scale in zip(sources, places, scales, strict=True):
        quantized, expected = quantize_blocks(source.cpu())
        assert torch.equal(scale.cpu(), expected), source.shape
        assert torch.equal(place.cpu().view(torch.uint8), quantized.contiguous().view(torch.uint8)), source.shape
