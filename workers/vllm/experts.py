"""Which experts a live vLLM rank holds, read from its own expert map (linear, round-robin or custom)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def held_experts(model: torch.nn.Module, vllm_config: Any) -> tuple[int, ...] | None:
    """Returns the experts of this rank in the order of its tensors; None if every rank holds a shard of all.

    Raises ConfigError for placements that differ between layers or may change (EPLB), because a refit is planned once.
    """
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise ConfigError("vLLM's EPLB moves experts at run time, but a refit is planned once; set enable_eplb to false")
    placements = dict(_placements(model))
    different = {name: held for name, held in placements.items() if held != next(iter(placements.values()))}
    if different:
        name, held = next(iter(different.items()))
        raise ConfigError(
            f"vLLM's {name!r} holds the experts {held}, but {next(iter(placements))!r} holds "
            f"{next(iter(placements.values()))}; a refit needs one placement for all layers"
        )
    return next(iter(placements.values()), None)


def _placements(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields each layer with an expert map (global to local number, -1: elsewhere), and its experts by local number."""
    for name, module in model.named_modules():
        mapping = getattr(module, "_expert_map", None)
        if mapping is None:
            continue
        local = {number: expert for expert, number in enumerate(mapping.tolist()) if number >= 0}
        yield name, tuple(local[number] for number in sorted(local))
