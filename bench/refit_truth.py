"""The truth of a refit benchmark: what every element of a model is, computed from its place alone, on any rank.

Every element's bits are a function of its parameter's name and its index in the global tensor. So each rank fills what it
holds, and checks what it got, without a full tensor anywhere and without looking at how the bytes travelled.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from dagrl.refit.pack import views
from dagrl.refit.quantize import quantize_blocks, scale_shape
from dagrl.refit.slices import STACKED, Box, WeightSlice, numbered

_STEPS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_SIGN_AND_FRACTION, _EXPONENT = 0x81FF, 0x3C00
"""Of a bfloat16: the bits that vary (sign, fraction, two of the exponent), and those that are set: 2^-7 to 2^-3."""


def expected(name: str, box: Box, version: int, device: torch.device) -> torch.Tensor:
    """The bfloat16 elements of `box` of the parameter `name`."""
    mixed = torch.full((), zlib.crc32(name.encode()) + version * 0x27D4EB2F, dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(box):
        index = torch.arange(start, stop, dtype=torch.int64, device=device) * _STEPS[dim % len(_STEPS)]
        mixed = mixed.unsqueeze(-1) + index
    bits = ((mixed >> 11) ^ mixed) & _SIGN_AND_FRACTION | _EXPONENT
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)


def _boxes(held: WeightSlice) -> list[tuple[str, Box]]:
    """The parameters, and the boxes of them, that a slice stands for; a stack parameter by parameter."""
    if STACKED not in held.name:
        return [(held.name, held.box)]
    return [(numbered(held.name, number), held.box[1:]) for number in range(*held.box[0])]


def _parts(tensors: Mapping[str, torch.Tensor], held: WeightSlice) -> list[torch.Tensor]:
    """The live views that hold `_boxes(held)`."""
    found = views(tensors, held.tensor, held.local, [stop - start for start, stop in held.box])
    if STACKED in held.name and STACKED not in held.tensor:
        return list(found[0])
    return found


def fill(tensors: Mapping[str, torch.Tensor], slices: Sequence[WeightSlice], version: int) -> None:
    """Write what a source of `slices` holds at `version`."""
    for held in slices:
        for part, (name, box) in zip(_parts(tensors, held), _boxes(held), strict=True):
            part.copy_(expected(name, box, version, part.device))


def clear(tensors: Mapping[str, torch.Tensor]) -> None:
    """Make sure that what is found later was written later."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(0xA5) if tensor.is_contiguous() else tensor.zero_()


def wrong(
    tensors: Mapping[str, torch.Tensor],
    slices: Sequence[WeightSlice],
    version: int,
    aliases: Mapping[str, str] | None = None,
) -> list[str]:
    """The parameters of which a destination of `slices` does not hold `version`, bit for bit."""
    found: dict[str, None] = {}
    for held in slices:
        scales = _scales(tensors, held)
        for part, scale, (name, box) in zip(_parts(tensors, held), scales, _boxes(held), strict=True):
            truth = expected((aliases or {}).get(name, name), box, version, part.device)
            if scale is None:
                same = torch.equal(part.view(torch.int16), truth.view(torch.int16))
            else:
                quantized, factors = quantize_blocks(truth)
                same = torch.equal(part.view(torch.uint8), quantized.view(torch.uint8)) and torch.equal(scale, factors)
            if not same:
                found[name] = None
    return list(found)


def _scales(tensors: Mapping[str, torch.Tensor], held: WeightSlice) -> Sequence[torch.Tensor | None]:
    if held.scales is None:
        return [None] * len(_boxes(held))
    shape = scale_shape(tuple(stop - start for start, stop in held.box))
    found = views(tensors, held.scales.tensor, held.scales.local, shape)
    return list(found[0]) if STACKED in held.name else found


def described(slices: Sequence[WeightSlice], device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of exactly the sizes that `slices` speak of, uninitialised."""
    sizes: dict[str, list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}

    def include(tensor: str, local: Box, dtype: torch.dtype) -> None:
        ends = [stop for _, stop in local]
        names = [numbered(tensor, number) for number in range(*local[0])] if STACKED in tensor else [tensor]
        for name in names:
            own = ends[1:] if STACKED in tensor else ends
            sizes[name] = [max(pair) for pair in zip(sizes.get(name, own), own, strict=True)]
            dtypes[name] = dtype

    for held in slices:
        include(held.tensor, held.local, getattr(torch, held.dtype or "bfloat16"))
        if held.scales is not None:
            include(held.scales.tensor, held.scales.local, torch.float32)
    return {name: torch.empty(size, dtype=dtypes[name], device=device) for name, size in sizes.items()}
