"""Where the weights of a Hugging Face model lie in vLLM's tensors on one rank, as a pure function.

`workers.families` has the rules. Local tensor names are vLLM's parameter names; see `local_name` for the one that differs
between versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagrl.config import Json
from dagrl.refit.slices import WeightSlice
from workers.families import find_family
from workers.families.model import Derived, Family, Model
from workers.families.vllm import VllmRank, whole

VOCABULARY_PADDING = 64


def vllm_weight_slices(hf_config: Mapping[str, Json], rank: VllmRank) -> list[WeightSlice]:
    """Every weight that `rank` holds; tied embeddings are one tensor, described once.

    `hf_config` is the content of `config.json`. Raises ConfigError for a family without rules, LayoutError when sizes do not
    divide, RefitPlanError when a part of a fused tensor in FP8 begins inside a block.
    """
    return list(_model(find_family(hf_config), Model(hf_config), rank))


def local_name(parameter: str) -> str:
    """The name used here for a vLLM parameter: expert tensors have lain in `experts.routed_experts` since vLLM 0.25."""
    return parameter.replace(".experts.routed_experts.", ".experts.")


def derived_tensors(hf_config: Mapping[str, Json]) -> list[Derived]:
    """What vLLM computes from weights after a load, of all layers."""
    family, model = find_family(hf_config), Model(hf_config)
    prefix = family.names.vllm_layer
    return [rule for layer in range(model.layers) for rule in family.derived(model, layer, f"{prefix}.{layer}.")]


def _model(family: Family, model: Model, rank: VllmRank) -> Iterator[WeightSlice]:
    names = family.names
    yield from _vocabulary(model, rank, names.embedding, names.vllm_embedding)
    for layer in range(model.layers):
        yield from family.vllm_layer(model, rank, layer, f"{names.layer}.{layer}.", f"{names.vllm_layer}.{layer}.")
    yield whole(names.norm, model.hidden, tensor=names.vllm_norm)
    if not model.tied:
        yield from _vocabulary(model, rank, names.head, names.head)


def _vocabulary(model: Model, rank: VllmRank, name: str, tensor: str) -> Iterator[WeightSlice]:
    padded = -(-model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    start, stop = rank.part(padded, "the padded vocabulary")
    stop = min(stop, model.vocabulary)
    if start < stop:
        columns = (0, model.hidden)
        yield WeightSlice(name, ((start, stop), columns), tensor, ((0, stop - start), columns))
