"""Where Megatron-Core holds each Hugging Face parameter on one rank, a pure function; `workers.families` has the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagrl.config import Json
from dagrl.layout import ParallelLayout
from dagrl.refit.slices import WeightSlice, expand
from workers.families import find_family
from workers.families.megatron import MegatronModules, MegatronRank, padded_vocabulary, whole
from workers.families.model import Family, Model


def megatron_weight_slices(
    hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int, modules: MegatronModules | None = None
) -> list[WeightSlice]:
    """Everything that `rank` holds; `modules` are by default those of Megatron's local layers.

    Raises ConfigError for a family without rules, LayoutError where the layout does not fit the model or `rank` the layout.
    """
    family, model = find_family(hf_config), Model(hf_config)
    holder = MegatronRank(layout, layout.coordinates(rank), modules or MegatronModules())
    return [held for stage in range(layout.vpp) for held in _stage(family, model, holder, stage)]


def parameter_shapes(hf_config: Mapping[str, Json]) -> dict[str, tuple[int, ...]]:
    """Every parameter that a checkpoint of the model has, with its whole shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in expand(megatron_weight_slices(hf_config, ParallelLayout(), 0)):
        known = shapes.get(piece.name, (0,) * len(piece.box))
        shapes[piece.name] = tuple(max(size, stop) for size, (_, stop) in zip(known, piece.box, strict=True))
    return shapes


def _stage(family: Family, model: Model, rank: MegatronRank, stage: int) -> Iterator[WeightSlice]:
    layout, at, names = rank.layout, rank.at, family.names
    prefix = f"vp{stage}." if layout.vpp > 1 else ""
    is_first, is_last = at.pp == 0 and stage == 0, at.pp == layout.pp - 1 and stage == layout.vpp - 1
    if is_first:
        yield from _vocabulary(model, rank, names.embedding, f"{prefix}embedding.word_embeddings.weight")
    for local, layer in enumerate(layout.stage_layers(model.layers, at.pp, stage)):
        yield from family.megatron_layer(model, rank, layer, f"{names.layer}.{layer}.", f"{prefix}decoder.layers.{local}.")
    if is_last:
        yield whole(names.norm, f"{prefix}decoder.{names.megatron_norm}.weight", model.hidden)
    if is_last and not (model.tied and is_first):  # a model on one stage has one storage for both
        yield from _vocabulary(model, rank, names.embedding if model.tied else names.head, f"{prefix}output_layer.weight")


def _vocabulary(model: Model, rank: MegatronRank, name: str, tensor: str) -> Iterator[WeightSlice]:
    """Rows past the vocabulary have no slice, so a rank whose rows are all padding has none."""
    rows = padded_vocabulary(model.vocabulary, rank.layout.tp) // rank.layout.tp
    start = rank.at.tp * rows
    held = min(rows, model.vocabulary - start)
    if held > 0:
        columns = (0, model.hidden)
        yield WeightSlice(name, ((start, start + held), columns), tensor, ((0, held), columns))
