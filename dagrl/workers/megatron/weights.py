"""Maps Hugging Face parameters to Megatron-Core's tensors on one rank. A pure function of configuration and layout.

`dagrl.workers.families` has the rules of layers.
"""

from collections.abc import Iterator, Mapping

from dagrl.config import Json
from dagrl.errors import LayoutError
from dagrl.refit.slices import STACKED, WeightSlice, full_shapes, numbered
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.decoder import check_model_type, decoder_layer
from dagrl.workers.families.hf_config import SCORE, ModelConfig
from dagrl.workers.families.megatron import MegatronRank, padded_vocabulary, replicated

EMBEDDING = "model.embed_tokens.weight"


def megatron_weight_slices(hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
    """Returns every slice that `rank` holds.

    Raises ConfigError for a model without rules, LayoutError if the layout does not fit the model, or `rank` the layout.
    """
    check_model_type(hf_config)
    model, holder = ModelConfig(hf_config), MegatronRank(layout, layout.coordinates(rank))
    try:
        return [piece for stage in range(layout.vpp) for piece in _stage(model, holder, stage)]
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


def _stage(model: ModelConfig, rank: MegatronRank, stage: int) -> Iterator[WeightSlice]:
    layout, at = rank.layout, rank.at
    prefix = f"vp{stage}." if layout.vpp > 1 else ""
    is_first, is_last = at.pp == 0 and stage == 0, at.pp == layout.pp - 1 and stage == layout.vpp - 1
    if is_first:
        yield from _vocabulary(model, rank, EMBEDDING, f"{prefix}embedding.word_embeddings.weight")
    for local, layer in enumerate(layout.stage_layers(model.layers, at.pp, stage)):
        yield from decoder_layer(model, rank, layer, f"model.layers.{layer}.", f"{prefix}decoder.layers.{local}.")
    if is_last:
        yield replicated("model.norm.weight", f"{prefix}decoder.final_layernorm.weight", model.hidden)
    if is_last and model.scalar:
        yield replicated(SCORE, f"{prefix}output_layer.weight", 1, model.hidden)
    elif is_last and not (model.tied and is_first):  # on a single stage both share one tensor
        yield from _vocabulary(model, rank, EMBEDDING if model.tied else "lm_head.weight", f"{prefix}output_layer.weight")


def _vocabulary(model: ModelConfig, rank: MegatronRank, name: str, tensor: str) -> Iterator[WeightSlice]:
    """Yields the vocabulary rows of a rank. Padding rows have no slice."""
    rows = padded_vocabulary(model.vocabulary, rank.layout.tp) // rank.layout.tp
    start = rank.at.tp * rows
    size = min(rows, model.vocabulary - start)
    if size > 0:
        columns = (0, model.hidden)
        yield WeightSlice(name, ((start, start + size), columns), tensor, ((0, size), columns))
