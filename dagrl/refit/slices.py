"""Boxes in global tensors, and where a rank holds them: the vocabulary in which both sides describe their weights."""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""One `(start, stop)` for each dimension of a global tensor."""


@dataclass(frozen=True)
class WeightSlice:
    """A box of one global parameter, and the strided view of a local tensor that holds it.

    `name` is the parameter's Hugging Face name, `box` the part of it held here, `tensor` the local tensor's name on this
    rank; `local` is the box's place inside that tensor, of the same extents as `box` up to dropped leading dimensions of
    size one (a grouped-expert tensor `[E, 2I, H]` holds a 2-d parameter at `((e, e + 1), (0, I), (0, H))`).
    """

    name: str
    box: Box
    tensor: str
    local: Box

    def __post_init__(self) -> None:
        lead = len(self.local) - len(self.box)
        extents = [stop - start for start, stop in self.box]
        held = [stop - start for start, stop in self.local]
        assert lead >= 0 and held == [1] * lead + extents, f"{self.name}: box {self.box} does not match {self.local}"


def intersect(first: Box, second: Box) -> Box | None:
    """The box in both, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return both if all(start < stop for start, stop in both) else None


def volume(box: Box) -> int:
    """Elements in a box."""
    elements = 1
    for start, stop in box:
        elements *= stop - start
    return elements
