"""Compares slices of vLLM's weights with those of the reference, which has names of its own."""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.refit.slices import Box, WeightSlice, expand


def local_name(parameter: str) -> str:
    """The name in the reference; since 0.25 vLLM's experts are in a module of their own."""
    return parameter.replace(".experts.routed_experts.", ".experts.")


Boxes = list[tuple[str, Box, str, Box, str, str, Box]]


def boxes(slices: Sequence[WeightSlice], dtype: str) -> Boxes:
    """Returns the content of slices, in an order and with names that rules and recordings share."""

    def tensor(name: str) -> str:
        return local_name(name).replace("mixer.A.loaded", "mixer.A_log")

    found = []
    for one in expand(slices):
        scales = ("", ()) if one.scales is None else (tensor(one.scales.tensor), one.scales.local)
        found.append((one.name, one.box, tensor(one.tensor), one.local, one.dtype or dtype, *scales))
    return sorted(found)
