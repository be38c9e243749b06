"""Maps Hugging Face parameters to Megatron-Core's tensors on one rank. A pure function of configuration and layout.

`dagrl.workers.families` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagrl.config import Json
from dagrl.errors import LayoutError
from dagrl.refit.slices import STACKED, WeightSlice, full_shapes, numbered
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families import find_family
from dagrl.workers.families.hf_config import SCORE, ModelConfig
from dagrl.workers.families.megatron import Family, MegatronModules, MegatronRank, padded_vocabulary, replicated


def megatron_weight_slices(
    hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int, modules: MegatronModules | None = None
) -> list[WeightSlice]:
    """Returns every slice that `rank` holds. `modules` defaults to Megatron's local layers.

    Raises ConfigError for a family without rules, LayoutError if the layout does not fit the model, or `rank` the layout.
    """
    family, model = find_family(hf_config), ModelConfig(hf_config)
    holder = MegatronRank(layout, layout.coordinates(rank), modules or MegatronModules())
    try:
        return [piece for stage in range(layout.vpp) for piece in _stage(family, model, holder, stage)]
    except LayoutError as error:
        raise LayoutError(f"train rank {rank} ({holder.at}) of {layout.describe()}: {error}") from error


def parameter_shapes(hf_config: Mapping[str, Json]) -> dict[str, tuple[int, ...]]:
    """Returns every parameter of the model's checkpoint with its full shape."""
    shapes = stacked_shapes(hf_config)
    dense = {name: shape for name, shape in shapes.items() if STACKED not in name}
    stacks = [(name, shape) for name, shape in shapes.items() if STACKED in name]
    return dense | {numbered(name, number): shape[1:] for name, shape in stacks for number in range(shape[0])}


def stacked_shapes(hf_config: Mapping[str, Json]) -> dict[str, tuple[int, ...]]:
    """Returns every parameter of the model with its full shape; a layer's experts as a stack `[experts, ...]`."""
    return full_shapes(megatron_weight_slices(hf_config, ParallelLayout(), 0))


def _stage(family: Family, model: ModelConfig, rank: MegatronRank, stage: int) -> Iterator[WeightSlice]:
    layout, at, names = rank.layout, rank.at, family.names
    prefix = f"vp{stage}." if layout.vpp > 1 else ""
    is_first, is_last = at.pp == 0 and stage == 0, at.pp == layout.pp - 1 and stage == layout.vpp - 1
    if is_first:
        yield from _vocabulary(model, rank, names.embedding, f"{prefix}embedding.word_embeddings.weight")
    for local, layer in enumerate(layout.stage_layers(model.layers, at.pp, stage)):
        yield from family.megatron_layer(model, rank, layer, f"{names.layer}.{layer}.", f"{prefix}decoder.layers.{local}.")
    if is_last:
        yield replicated(names.norm, f"{prefix}decoder.{names.megatron_norm}.weight", model.hidden)
    if is_last and model.scalar:
        yield replicated(SCORE, f"{prefix}output_layer.weight", 1, model.hidden)
    elif is_last and not (model.tied and is_first):  # on a single stage both share one tensor
        yield from _vocabulary(model, rank, names.embedding if model.tied else names.head, f"{prefix}output_layer.weight")


def _vocabulary(model: ModelConfig, rank: MegatronRank, name: str, tensor: str) -> Iterator[WeightSlice]:
    """Yields the vocabulary rows of a rank. Padding rows have no slice."""
    rows = rank.modules.vocabulary_rows or padded_vocabulary(model.vocabulary, rank.layout.tp) // rank.layout.tp
    start = rank.at.tp * rows
    size = min(rows, model.vocabulary - start)
    if size > 0:
        columns = (0, model.hidden)
        yield WeightSlice(name, ((start, start + size), columns), tensor, ((0, size), columns))
