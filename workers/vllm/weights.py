"""Maps the weights of a Hugging Face model to vLLM's tensors on one rank. A pure function.

`dagrl.workers.families` has the rules. Local tensor names are vLLM's parameter names, except that `local_name` hides a
difference between versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagrl.config import Json
from dagrl.refit.slices import WeightSlice
from dagrl.workers.families import find_family
from dagrl.workers.families.family import DerivedRule, Family
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.vllm import VllmRank, replicated

VOCABULARY_PADDING = 64


def vllm_weight_slices(hf_config: Mapping[str, Json], rank: VllmRank) -> list[WeightSlice]:
    """Returns every weight that `rank` holds. Tied embeddings are one tensor, described once.

    `hf_config` is the content of `config.json`. Raises ConfigError for a family without rules, LayoutError if sizes do not
    divide, RefitPlanError if a slice of a fused FP8 tensor starts inside a block.
    """
    return list(_model(find_family(hf_config), ModelConfig(hf_config), rank))


def local_name(parameter: str) -> str:
    """Returns our name of a vLLM parameter. Expert tensors are in `experts.routed_experts` since vLLM 0.25."""
    return parameter.replace(".experts.routed_experts.", ".experts.")


def derived_tensors(hf_config: Mapping[str, Json]) -> list[DerivedRule]:
    """Returns the rules for tensors that vLLM derives from weights after loading, for all layers."""
    family, model = find_family(hf_config), ModelConfig(hf_config)
    prefix = family.names.vllm_layer
    return [rule for layer in range(model.layers) for rule in family.derived(model, layer, f"{prefix}.{layer}.")]


def _model(family: Family, model: ModelConfig, rank: VllmRank) -> Iterator[WeightSlice]:
    names = family.names
    yield from _vocabulary(model, rank, names.embedding, names.vllm_embedding)
    for layer in range(model.layers):
        yield from family.vllm_layer(model, rank, layer, f"{names.layer}.{layer}.", f"{names.vllm_layer}.{layer}.")
    yield replicated(names.norm, model.hidden, tensor=names.vllm_norm)
    if not model.tied:
        yield from _vocabulary(model, rank, names.head, names.head)


def _vocabulary(model: ModelConfig, rank: VllmRank, name: str, tensor: str) -> Iterator[WeightSlice]:
    padded = -(-model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    start, stop = rank.part(padded, "the padded vocabulary")
    stop = min(stop, model.vocabulary)
    if start < stop:
        columns = (0, model.hidden)
        yield WeightSlice(name, ((start, stop), columns), tensor, ((0, stop - start), columns))
