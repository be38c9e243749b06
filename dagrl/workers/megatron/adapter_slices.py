"""LoRA adapters as weight slices, for refits that send adapters alone. Pure functions; nothing imports torch.

A parameter `q_proj.weight` [outputs, inputs] has A, `q_proj.lora_A.weight` [dim, inputs], and B, `q_proj.lora_B.weight`
[outputs, dim]. B is sent times the scale of the adapters, as vLLM's LoRA slots expect it. Train workers hold A and B of
the parameters that they have a part of, whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.config import PeftConfig
from dagrl.errors import ConfigError
from dagrl.refit.slices import STACKED, WeightSlice, numbered
from dagrl.workers.megatron.adapter_files import KEY, AdapterShapes, is_target


def adapter_names(parameter: str) -> tuple[str, str]:
    """Returns the names of a parameter's A and B in a refit."""
    module = parameter.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def targets(shapes: AdapterShapes, settings: PeftConfig) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of `shapes`, where experts are stacks, that have adapters.

    Raises ConfigError if some experts of a layer have one and others have none: vLLM's slots are for all of them.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        numbers = range(shape[0]) if STACKED in name else range(1)
        adapted = [is_target(numbered(name, number), settings) for number in numbers]
        if any(adapted) and not all(adapted):
            raise ConfigError(
                f"{KEY}.target_modules has some experts of {name!r} and not others, but vLLM's LoRA slots are for all "
                f"experts of a layer; name all or none, or set {KEY}.refit=merged"
            )
        if all(adapted):
            found[name] = shape
    return found


def trained_adapters(slices: Sequence[WeightSlice], adapted: AdapterShapes, settings: PeftConfig) -> list[WeightSlice]:
    """Returns the adapters of a train worker whose weights are `slices`. `adapted`: see `targets`."""
    found: dict[WeightSlice, None] = {}
    for one in slices:
        if one.name in adapted:
            *experts, outputs, inputs = adapted[one.name]
            numbers = one.box[:1] if experts else ()
            for name, sizes in zip(adapter_names(one.name), ((settings.dim, inputs), (outputs, settings.dim)), strict=True):
                box = (*numbers, *((0, size) for size in sizes))
                found[WeightSlice(name, box, name, box)] = None
    return list(found)
