"""Which experts a live vLLM rank holds, read from its own mapping: linear, round-robin or whatever it was told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def held_experts(model: torch.nn.Module, vllm_config: Any) -> tuple[int, ...] | None:
    """The experts of this rank in the order in which its tensors hold them; None where every rank holds a part of all.

    Raises ConfigError for placements that differ from layer to layer or may change (EPLB): a refit is planned once.
    """
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise ConfigError("vLLM's EPLB moves experts while it runs, and a refit is planned once; set enable_eplb to false")
    placements = dict(_placements(model))
    different = {name: held for name, held in placements.items() if held != next(iter(placements.values()))}
    if different:
        name, held = next(iter(different.items()))
        raise ConfigError(
            f"vLLM's {name!r} holds the experts {held}, but {next(iter(placements))!r} {next(iter(placements.values()))}; a "
            "refit expects one placement for all layers"
        )
    return next(iter(placements.values()), None)


def _placements(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of every layer with a mapping of global to local experts (-1: held elsewhere), the experts by local number."""
    for name, module in model.named_modules():
        mapping = getattr(module, "_expert_map", None)
        if mapping is None:
            continue
        local = {number: expert for expert, number in enumerate(mapping.tolist()) if number >= 0}
        yield name, tuple(local[number] for number in sorted(local))
