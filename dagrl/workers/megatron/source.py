"""Slices of Megatron-Core models that others have built: Megatron-Bridge's, verl's or NeMo-RL's, or a plain GPTModel.

    held = megatron_source(chunks, hf_config, dtype="bfloat16")     # on every rank, after Megatron's groups are made
    RefitSender(plan, held.tensors, channel)                        # `plan` from `meet(..., held.slices)`

`chunks` are what the framework calls the model: one module, or one per virtual stage, also inside DDP and Float16Module.
Sizes and rank are those of Megatron's process groups, and the modules themselves say how they name and fuse parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagrl.config import Json
from dagrl.errors import LayoutError, RefitPlanError
from dagrl.refit.slices import STACKED, WeightSlice, expand, numbered
from dagrl.refit.sources import check_plain
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.megatron import MegatronModules
from dagrl.workers.megatron.weights import megatron_weight_slices
from dagrl.workers.train.hf_load import VOCABULARY_TENSORS, uncovered

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MegatronSource:
    """This rank's slices, and the live tensors by the names in them."""

    slices: Sequence[WeightSlice]
    tensors: Mapping[str, torch.Tensor]


def megatron_source(
    chunks: torch.nn.Module | Sequence[torch.nn.Module], hf_config: Mapping[str, Json], *, dtype: str
) -> MegatronSource:
    """Returns the slices and tensors of this rank's model.

    `hf_config` is the content of the checkpoint's `config.json`. `dtype` is that of the plan; slices of tensors in another
    dtype have theirs. Raises ConfigError for a family without rules, LayoutError if Megatron's ranks are not in its default
    order, RefitPlanError if the modules hold parameters that the rules do not describe.
    """
    parts = list(chunks) if isinstance(chunks, Sequence) else [chunks]
    models = [_unwrapped(part) for part in parts]
    tensors: dict[str, torch.Tensor] = {}
    for stage, model in enumerate(models):
        prefix = f"vp{stage}." if len(models) > 1 else ""
        biases = [(name, bias) for name, bias in model.named_buffers() if name.endswith("expert_bias")]
        for name, tensor in (*model.named_parameters(), *biases):
            check_plain(name, tensor)
            tensors[f"{prefix}{name}"] = tensor  # not its data, which an offload may replace
    layout, rank = _layout(models)
    slices = megatron_weight_slices(hf_config, layout, rank, _modules(tensors))
    return MegatronSource([_typed(bias, tensors, dtype) for bias in _checked(slices, tensors)], tensors)


def _unwrapped(module: Any) -> torch.nn.Module:
    while not hasattr(module, "decoder") and hasattr(module, "module"):
        module = module.module
    model: torch.nn.Module = module
    return model


def _layout(models: Sequence[Any]) -> tuple[ParallelLayout, int]:
    """Returns sizes and rank of Megatron's process groups."""
    from megatron.core import parallel_state as state

    config = models[0].config
    layout = ParallelLayout(
        dp=state.get_data_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        tp=state.get_tensor_model_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_world_size(),
        vpp=len(models),
        first_stage_layers=config.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.num_layers_in_last_pipeline_stage,
    )
    at = {
        "tp": state.get_tensor_model_parallel_rank(),
        "cp": state.get_context_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
    }
    rank = layout.rank(**at)
    ours = layout.coordinates(rank)
    experts = state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank()
    if experts != (ours.ep, ours.etp):
        raise LayoutError(
            f"Megatron's groups give this rank the expert ranks (ep, etp) {experts}, expected {(ours.ep, ours.etp)}; use "
            "Megatron's default order, tp-cp-ep-dp-pp"
        )
    return layout, rank


def _modules(tensors: Mapping[str, torch.Tensor]) -> MegatronModules:
    rows = next((len(tensor) for name, tensor in tensors.items() if name.endswith(VOCABULARY_TENSORS)), None)
    return MegatronModules(
        transformer_engine=any(name.endswith(".layer_norm_weight") for name in tensors),
        grouped_experts=any(name.endswith(".experts.linear_fc1.weight0") for name in tensors),
        vocabulary_rows=rows,
    )


def _checked(slices: Sequence[WeightSlice], tensors: Mapping[str, torch.Tensor]) -> Sequence[WeightSlice]:
    """Returns the slices. Raises RefitPlanError unless they cover every element, except the vocabulary's padding."""
    left = uncovered(list(expand(slices)), tensors)
    odd = [name for name, count in left.items() if count and not name.endswith(VOCABULARY_TENSORS)]
    if odd:
        raise RefitPlanError(
            f"the rules of this family do not describe {', '.join(map(repr, odd[:4]))} of {len(odd)} tensors of the model; "
            "merge adapters before a refit, or describe these tensors yourself (docs/refit.md)"
        )
    return slices


def _typed(piece: WeightSlice, tensors: Mapping[str, torch.Tensor], dtype: str) -> WeightSlice:
    name = numbered(piece.tensor, piece.local[0][0]) if STACKED in piece.tensor else piece.tensor
    dtype_name = str(tensors[name].dtype).removeprefix("torch.")
    return replace(piece, dtype="" if dtype_name == dtype else dtype_name)
