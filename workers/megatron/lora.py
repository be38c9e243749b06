"""LoRA on Megatron's linear layers in any layout: only adapters have gradients and optimizer state.

An adapted weight is computed before its layer runs: `W + scale * B @ A` (Hu et al. 2021, arXiv:2106.09685; with `use_rslora`
the scale is alpha / sqrt(dim), arXiv:2312.03732). The weight layout says which box of which Hugging Face parameter is where
in a local tensor, so one rule covers column, row, QKV, gate-up and expert layers. Adapters are those of Hugging Face's
parameters, as in PEFT. Each rank holds the whole A and B of the parameters that it has a part of, and gradients are summed
over the tensor-parallel ranks. A refit sends the weights that training computes with, bit by bit. Imported only where
Megatron is.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from dagrl.config import PeftConfig
from dagrl.refit.slices import Box, WeightSlice, expand
from dagrl.workers.megatron.adapter_files import AdapterShapes, is_target
from dagrl.workers.megatron.model import ADAPTERS, ModelChunks

Pair = tuple[torch.nn.Parameter, torch.nn.Parameter]
"""A [dim, inputs] and B [outputs, dim] of one Hugging Face parameter."""

_LAYER = re.compile(r"((?:vp\d+\.)?decoder\.layers\.\d+)\.(.+)\.weight")


class LayerAdapters(torch.nn.Module):
    """The adapters of one transformer layer on this rank, by Hugging Face name."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: dict[str, Pair] = {}

    def add(self, name: str, a: torch.nn.Parameter, b: torch.nn.Parameter) -> None:
        """Adds A [dim, inputs] and B [outputs, dim] of the parameter `name`."""
        for part, parameter in (("A", a), ("B", b)):
            self.register_parameter(f"{name.replace('.', '-')}-{part}", parameter)
        self.pairs[name] = a, b

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns nothing: Megatron would name adapters by their layer on this stage."""
        return {}

    def sharded(self) -> list[ShardedTensor]:
        """Returns Megatron's sharded tensors: every adapter whole, under a name that does not depend on the layout."""
        return [
            ShardedTensor.from_rank_offsets(f"{ADAPTERS}.{name}.{part}", parameter, replica_id=_replica(parameter))
            for name, pair in self.pairs.items()
            for part, parameter in zip("AB", pair, strict=True)
        ]


@dataclass(frozen=True)
class WeightPart:
    """Rows of a local weight, the box of a Hugging Face parameter in them, and its A and B, if it has any."""

    rows: slice
    box: Box
    pair: Pair | None


@dataclass(frozen=True)
class AdaptedWeight:
    """One local weight, and its parts from top to bottom."""

    module: torch.nn.Module
    base: torch.nn.Parameter
    parts: tuple[WeightPart, ...]
    scale: float

    def merged(self) -> Tensor:
        """Returns the weight with its adapters, differentiable in them."""
        rows = []
        for part in self.parts:
            weight = self.base[part.rows]
            if part.pair is not None:
                (first, last), (left, right) = part.box
                weight = torch.addmm(weight, part.pair[1][first:last], part.pair[0][:, left:right], alpha=self.scale)
            rows.append(weight)
        return torch.cat(rows)


class Adapters:
    """The adapters of this rank. `pairs` has A and B by the Hugging Face name of the parameter."""

    def __init__(self, layers: Mapping[torch.nn.Module, list[AdaptedWeight]], scale: float) -> None:
        self.layers, self.scale = layers, scale
        modules = [layer.get_submodule(ADAPTERS) for layer in layers]
        self.pairs = {k: pair for one in modules if isinstance(one, LayerAdapters) for k, pair in one.pairs.items()}
        self._disabled = False
        for layer, weights in layers.items():
            layer.register_forward_pre_hook(lambda *_, weights=weights: self._merge(weights))
            layer.register_forward_hook(lambda *_, weights=weights: _forget(weights), always_call=True)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context in which the model is the base model."""
        self._disabled = True
        try:
            yield
        finally:
            self._disabled = False

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Context in which the model's parameters hold the merged weights. Takes a copy of the adapted weights."""
        weights = [weight for layer in self.layers.values() for weight in layer]
        kept = [weight.base.data for weight in weights]
        try:
            with torch.no_grad():
                for weight in weights:
                    weight.base.data = weight.merged()
            yield
        finally:
            for weight, data in zip(weights, kept, strict=True):
                weight.base.data = data

    def _merge(self, weights: Sequence[AdaptedWeight]) -> None:
        # An entry of the module's own dictionary hides its parameter, which stays registered.
        for weight in () if self._disabled else weights:
            weight.module.__dict__["weight"] = weight.merged()


def _forget(weights: Sequence[AdaptedWeight]) -> None:
    for weight in weights:
        weight.module.__dict__.pop("weight", None)


def add_adapters(
    model: ModelChunks,
    slices: Sequence[WeightSlice],
    siblings: Sequence[Sequence[WeightSlice]],
    shapes: AdapterShapes,
    settings: PeftConfig,
    seed: int,
) -> Adapters:
    """Freezes the model and adds adapters: A random, equal on all ranks, and B zero, as in PEFT.

    `slices` are those of this rank, `siblings` of all its tensor-parallel ranks, which have the same adapters. `shapes` are
    the full shapes of all parameters.
    """
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:  # a recomputed layer without an input that needs gradients would have none
            chunk.embedding.register_forward_hook(_need_gradients)
    scale = settings.alpha / (math.sqrt(settings.dim) if settings.use_rslora else settings.dim)
    layers: dict[torch.nn.Module, list[AdaptedWeight]] = {}
    names = [_names(held) for held in siblings]
    for tensor, pieces in _by_tensor(slices).items():
        shared = dict.fromkeys(name for held in names for name in held.get(tensor, ()))
        match = _LAYER.fullmatch(tensor)
        if match is None or not any(is_target(name, settings) for name in shared):
            continue
        layer, module = _module(model, match[1]), _module(model, f"{match[1]}.{match[2]}")
        if not _is_dense(module.weight):  # tensor-parallel ranks may have other experts
            shared = dict.fromkeys(piece.name for piece in pieces)
        if layer not in layers:
            layer.add_module(ADAPTERS, LayerAdapters())
        pairs = {
            name: _new_pair(name, shapes[name], module.weight, settings.dim, seed)  # type: ignore[arg-type]
            for name in shared
            if is_target(name, settings)
        }
        for name, pair in pairs.items():
            layer.get_submodule(ADAPTERS).add(name, *pair)  # type: ignore[operator]
        weight = AdaptedWeight(module, module.weight, _parts(pieces, pairs, shapes), scale)  # type: ignore[arg-type]
        layers.setdefault(layer, []).append(weight)
    return Adapters(layers, scale)


def _parts(pieces: Sequence[WeightSlice], pairs: Mapping[str, Pair], shapes: AdapterShapes) -> tuple[WeightPart, ...]:
    """Returns the parts of a local weight, and those without rows of adapters that only other ranks use.

    The latter give these adapters a gradient of 0.
    """
    held = {piece.name for piece in pieces}
    parts = [WeightPart(slice(*piece.local[-2]), piece.box, pairs.get(piece.name)) for piece in pieces]
    idle = [(((0, 0), (0, shapes[name][1])), pair) for name, pair in pairs.items() if name not in held]
    return (*parts, *(WeightPart(slice(0, 0), box, pair) for box, pair in idle))


def sum_adapter_gradients(chunks: list[Any], *_: Any, **__: Any) -> None:
    """Sums gradients over all ranks. Megatron's `finalize_model_grads` expects gradients of embeddings."""
    for chunk in chunks:
        chunk.finish_grad_sync()
    dense, expert = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    for chunk in chunks:
        for group, buffers in ((dense, chunk.buffers), (expert, chunk.expert_parallel_buffers)):
            for buffer in buffers if dist.get_world_size(group) > 1 else ():
                dist.all_reduce(buffer.grad_data, group=group)


def _need_gradients(_: object, __: object, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _by_tensor(slices: Sequence[WeightSlice]) -> dict[str, list[WeightSlice]]:
    """Returns the pieces of each local matrix from top to bottom."""
    found: dict[str, list[WeightSlice]] = {}
    for piece in expand(slices):
        if len(piece.box) == 2:
            found.setdefault(piece.tensor, []).append(piece)
    return {tensor: sorted(pieces, key=lambda piece: piece.local) for tensor, pieces in found.items()}


def _names(slices: Sequence[WeightSlice]) -> dict[str, list[str]]:
    """Returns the parameters that each local matrix has a part of."""
    return {tensor: [piece.name for piece in pieces] for tensor, pieces in _by_tensor(slices).items()}


def _is_dense(parameter: Any) -> bool:
    """Whether Megatron reduces the parameter over the data-parallel ranks of dense layers."""
    return getattr(parameter, "allreduce", True)


def _module(model: ModelChunks, name: str) -> torch.nn.Module:
    stage, _, rest = name.partition(".")
    if stage.startswith("vp"):
        return model.chunks[int(stage[2:])].get_submodule(rest)  # type: ignore[no-any-return]
    return model.chunks[0].get_submodule(name)  # type: ignore[no-any-return]


def _new_pair(name: str, shape: Sequence[int], base: torch.nn.Parameter, dim: int, seed: int) -> Pair:
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    bound = 1 / math.sqrt(inputs)  # PEFT's kaiming_uniform_(a=sqrt(5))
    a = torch.empty(dim, inputs).uniform_(-bound, bound, generator=generator)
    pair = tuple(
        torch.nn.Parameter(value.to(device=base.device, dtype=base.dtype)) for value in (a, torch.zeros(outputs, dim))
    )
    for parameter in pair:
        _mark(parameter, is_expert=not _is_dense(base))
    return pair[0], pair[1]


def _mark(parameter: Any, is_expert: bool) -> None:
    """Sets what Megatron reads: the replicas' group, and which rank counts the parameter in gradient norms."""
    parameter.allreduce = not is_expert
    if is_expert:
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        parameter.shared = parallel_state.get_expert_tensor_parallel_rank() > 0


def _replica(parameter: Any) -> tuple[int, int, int]:
    if parameter.allreduce:
        tp = parallel_state.get_tensor_model_parallel_rank()
        return 0, tp, parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return 0, parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_data_parallel_rank()
