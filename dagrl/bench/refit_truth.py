"""Expected values of a refit benchmark: every element's bits follow from its parameter's name and its global index.

Each rank fills its sources and checks its destinations by itself, without a full tensor anywhere and independently of how
the bytes were sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from dagrl.refit.carry.pack import views
from dagrl.refit.fp8 import BLOCK, scale_shape
from dagrl.refit.slices import STACKED, WeightSlice, expand, numbered

_STEPS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_SIGN_AND_FRACTION, _EXPONENT = 0x81FF, 0x3C00
"""Bits of a bfloat16 that vary (sign, fraction, two of the exponent) and bits that are set: values from 2^-7 to 2^-3."""


def expected(held: WeightSlice, device: torch.device, aliases: Mapping[str, str] | None = None) -> torch.Tensor:
    """Returns a slice's bfloat16 elements; those of a stack follow from the names of its parameters."""
    name, box = (aliases or {}).get(held.name, held.name), held.box
    names, inner = [name], box
    if STACKED in name:
        names, inner = [numbered(name, number) for number in range(*box[0])], box[1:]
    seeds = [zlib.crc32(one.encode()) for one in names]
    mixed = torch.tensor(seeds, dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(inner):
        mixed = mixed.unsqueeze(-1) + torch.arange(start, stop, dtype=torch.int64, device=device) * _STEPS[dim]
    bits = ((mixed >> 11) ^ mixed) & _SIGN_AND_FRACTION | _EXPONENT
    elements = torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)
    return elements if STACKED in name else elements[0]


def _parts(tensors: Mapping[str, torch.Tensor], held: WeightSlice, truth: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Returns the live views that hold a slice, each with its expected values."""
    found = views(tensors, held.tensor, held.local, [stop - start for start, stop in held.box])
    return list(zip(found, truth, strict=True)) if STACKED in held.tensor else [(found[0], truth)]


def fill(tensors: Mapping[str, torch.Tensor], slices: Sequence[WeightSlice]) -> None:
    """Writes the contents of a source of `slices`."""
    device = next(iter(tensors.values())).device
    for held in slices:
        parts = _parts(tensors, held, expected(held, device))
        torch._foreach_copy_([part for part, _ in parts], [truth for _, truth in parts])


def clear(tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrites all tensors, so that values found later were written later."""
    for tensor in tensors.values():
        tensor.detach().view(torch.uint8).fill_(0xA5)


def wrong(
    tensors: Mapping[str, torch.Tensor], slices: Sequence[WeightSlice], aliases: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the parameters (or stacks) of `slices` whose destination differs from the expected values in any bit."""
    device = next(iter(tensors.values())).device
    return [held.name for held in slices if not _holds(tensors, held, expected(held, device, aliases))]


def _holds(tensors: Mapping[str, torch.Tensor], held: WeightSlice, truth: torch.Tensor) -> bool:
    if held.scales is None:
        return all(torch.equal(part.view(torch.int16), one.view(torch.int16)) for part, one in _parts(tensors, held, truth))
    quantized, factors = _quantized(truth)
    (part,) = views(tensors, held.tensor, held.local, truth.shape)
    (scale,) = views(tensors, held.scales.tensor, held.scales.local, scale_shape(tuple(truth.shape)))
    return torch.equal(part.view(torch.uint8), quantized.view(torch.uint8)) and torch.equal(scale, factors)


def _quantized(truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `truth` to e4m3 in blocks of 128x128 with float32 scales; float64 makes each operation round once.

    On GPUs torch divides by a number by multiplying with its inverse, which may be off by one in the last place.
    """
    *lead, rows, columns = truth.shape
    down, right = scale_shape((rows, columns))
    padded = torch.nn.functional.pad(truth, (0, right * BLOCK - columns, 0, down * BLOCK - rows))
    blocks = padded.view(*lead, down, BLOCK, right, BLOCK).float()
    peaks = blocks.abs().amax((-3, -1), keepdim=True).clamp(1e-4)
    factors = (peaks.double() / 448).float()
    quantized = (blocks * (1 / factors.double()).float()).to(torch.float8_e4m3fn)
    return quantized.view(padded.shape)[..., :rows, :columns].contiguous(), factors.view(*lead, down, right)


def described(slices: Sequence[WeightSlice], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns uninitialized tensors of the sizes in `slices`."""
    sizes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for one in expand(slices):
        held = [(one.tensor, one.local, getattr(torch, one.dtype or "bfloat16"))]
        held += [(one.scales.tensor, one.scales.local, torch.float32)] if one.scales else []
        for name, local, dtype in held:
            ends = tuple(stop for _, stop in local)
            sizes[name], dtypes[name] = tuple(map(max, ends, sizes.get(name, ends))), dtype
    return {name: torch.empty(size, dtype=dtypes[name], device=device) for name, size in sizes.items()}
