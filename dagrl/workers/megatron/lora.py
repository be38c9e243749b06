"""LoRA on Megatron's linear layers in any layout: only adapters have gradients and optimizer state.

An adapted weight is computed before its layer runs: `W + alpha / dim * B @ A` (Hu et al. 2021, arXiv:2106.09685). The weight
layout says which box of which Hugging Face parameter is where in a local tensor, so one rule covers column, row, QKV and
gate-up layers. Adapters are those of Hugging Face's parameters, as in PEFT. Each rank holds the whole adapter of the
parameters that it has a part of, and gradients are summed over the tensor-parallel ranks. A merged refit sends the weights
that training computes with, bit by bit.

The gradient of the whole weight would be a product as large as the forward pass, for nothing: with the layer's input x and
the gradient g of its output, those of the adapters are `scale * g^T (x A^T)` and `scale * (g B)^T x` (`leave_weight_out`).
Imported only where Megatron is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight
from torch import Tensor

from dagrl.attributes import setting
from dagrl.config import PeftConfig
from dagrl.refit.slices import WeightSlice, expand
from dagrl.workers.megatron.model import ADAPTERS, ModelChunks
from dagrl.workers.train.adapters import AdapterShapes, adapter_names, first_factors, is_target

PARTS = "AB"  # names of the parts of an adapter in modules and checkpoints

_LAYER = re.compile(r"((?:vp\d+\.)?decoder\.layers\.\d+)\.(.+)\.weight")

Adapter = tuple[torch.nn.Parameter, torch.nn.Parameter]  # A [dim, inputs] and B [outputs, dim] of one Hugging Face parameter
Factors = tuple[Tensor, Tensor]  # all B and all A as one product: [rows, adapters * dim] and [adapters * dim, columns]


@dataclass(frozen=True)
class AdapterStack:
    """The adapters of one local weight, computed together, in the same order on all tensor-parallel ranks.

    A fused query, key and value weight has a part per head group, and a product for each would take longer to launch than to
    compute. With the rows of all B under each other: row `sources[i]` of them belongs at `places[i]`, which is
    `row * adapters + adapter`. `whole`: one adapter has all rows, in order. `columns`: those of A that the weight has.
    """

    adapters: Sequence[Adapter]
    rows: int
    sources: Tensor
    places: Tensor
    whole: bool
    columns: slice

    @classmethod
    def of(cls, weight: Tensor, pieces: Sequence[WeightSlice], adapters: Mapping[str, Adapter]) -> AdapterStack:
        """Stacks the adapters of a local weight whose `pieces` are these, from top to bottom."""
        starts = dict(zip(adapters, accumulate((len(b) for _, b in adapters.values()), initial=0), strict=False))
        sources, places = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
        for piece in pieces:
            if piece.name in adapters:
                sources.append(torch.arange(*piece.box[0]) + starts[piece.name])
                places.append(torch.arange(*piece.local[-2]) * len(adapters) + list(adapters).index(piece.name))
        sources_at, places_at = (torch.cat(indices).to(weight.device) for indices in (sources, places))
        length = sum(len(b) for _, b in adapters.values())
        whole = len(adapters) == 1 and torch.equal(sources_at, places_at) and len(sources_at) == len(weight) == length
        return cls(list(adapters.values()), len(weight), sources_at, places_at, whole, slice(*pieces[0].box[1]))

    def factors(self) -> Factors:
        """Returns the factors."""
        wide = torch.cat([adapter[1] for adapter in self.adapters])
        if not self.whole:
            empty = wide.new_zeros(self.rows * len(self.adapters), wide.shape[1])
            wide = empty.index_copy(0, self.places, wide[self.sources]).view(self.rows, -1)
        return wide, torch.cat([adapter[0][:, self.columns] for adapter in self.adapters])

    def gradients(self, of_wide: Tensor, of_narrow: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of A and B of each adapter from those of the factors."""
        if not self.whole:
            rows = of_wide.reshape(self.rows * len(self.adapters), -1)[self.places]
            length = sum(len(adapter[1]) for adapter in self.adapters)
            of_wide = rows.new_zeros(length, rows.shape[1]).index_copy_(0, self.sources, rows)
        inputs = self.adapters[0][0].shape[1]
        if of_narrow.shape[1] < inputs:  # the other columns are those of other ranks
            of_narrow = torch.nn.functional.pad(of_narrow, (self.columns.start, inputs - self.columns.stop))
        of_a = torch.split(of_narrow, [len(adapter[0]) for adapter in self.adapters])
        of_b = torch.split(of_wide, [len(adapter[1]) for adapter in self.adapters])
        return tuple(part for pair in zip(of_a, of_b, strict=True) for part in pair)


class LayerAdapters(torch.nn.Module):
    """The adapters of one transformer layer on this rank, by Hugging Face name."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Adapter] = {}

    def add(self, name: str, adapter: Adapter) -> None:
        """Adds the adapter of the parameter `name`."""
        for part, parameter in zip(PARTS, adapter, strict=True):
            self.register_parameter(f"{name.replace('.', '-')}-{part}", parameter)
        self.held[name] = adapter

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns nothing: Megatron would name adapters by their layer on this stage."""
        return {}

    def sharded(self) -> list[ShardedTensor]:
        """Returns Megatron's sharded tensors: every adapter whole, under a name that does not depend on the layout."""
        dp = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        replica = 0, parallel_state.get_tensor_model_parallel_rank(), dp
        return [
            ShardedTensor.from_rank_offsets(f"{ADAPTERS}.{name}.{part}", parameter, replica_id=replica)
            for name, adapter in self.held.items()
            for part, parameter in zip(PARTS, adapter, strict=True)
        ]


@dataclass(frozen=True)
class AdaptedWeight:
    """One local weight, `base`, and its adapters."""

    module: torch.nn.Module
    base: torch.nn.Parameter
    stack: AdapterStack
    scale: float

    def merge(self) -> None:
        """Merges the adapters into the weight that the module uses in this pass, and gives it their factors."""
        with torch.no_grad():
            factors = self.stack.factors()
            # Entries of the module's own dictionary hide its parameter, which stays registered.
            self.module.__dict__.update(weight=torch.addmm(self.base, *factors, alpha=self.scale), factors=factors)

    def forget(self) -> None:
        """Restores the module's base weight."""
        for name in ("weight", "factors"):
            self.module.__dict__.pop(name, None)

    def merged(self) -> Tensor:
        """Returns the weight with its adapters."""
        return torch.addmm(self.base, *self.stack.factors(), alpha=self.scale)

    def running(self) -> tuple[AdapterStack, Factors] | None:
        """Returns the merged adapters between `merge` and `forget`."""
        factors = self.module.__dict__.get("factors")
        return None if factors is None else (self.stack, factors)


class Adapters:
    """The adapters of this rank. `held` has them by the Hugging Face name of the parameter."""

    def __init__(self, layers: Mapping[torch.nn.Module, list[AdaptedWeight]], scale: float) -> None:
        self.layers, self.scale = layers, scale
        modules = [layer.get_submodule(ADAPTERS) for layer in layers]
        self.held = {
            name: adapter for module in modules if isinstance(module, LayerAdapters) for name, adapter in module.held.items()
        }
        self._disabled = False
        self._scaled: dict[str, Tensor] = {}
        for layer in layers:
            layer.register_forward_pre_hook(self._merge)
            layer.register_forward_hook(self._forget, always_call=True)

    def sent(self) -> dict[str, Tensor]:
        """Returns A, and B times the scale, by their names in a refit of adapters alone. `scale_sent` updates the latter."""
        self._scaled = {name: torch.empty_like(adapter[1].data) for name, adapter in self.held.items()}
        return {
            part: tensor
            for name, adapter in self.held.items()
            for part, tensor in zip(adapter_names(name), (adapter[0], self._scaled[name]), strict=True)
        }

    def scale_sent(self) -> None:
        """Computes B times the scale for the next refit."""
        scaled = list(self._scaled.values())
        torch._foreach_copy_(scaled, [self.held[name][1].data for name in self._scaled])
        torch._foreach_mul_(scaled, self.scale)

    def disabled(self) -> AbstractContextManager[None]:
        """Switches the adapters off for the block."""
        return setting(self, _disabled=True)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Gives the model's parameters the merged weights for the block. Takes a copy of the adapted weights."""
        weights = [weight for layer in self.layers.values() for weight in layer]
        base_weights = [weight.base.data for weight in weights]
        try:
            with torch.no_grad():
                for weight in weights:
                    weight.base.data = weight.merged()
            yield
        finally:
            for weight, data in zip(weights, base_weights, strict=True):
                weight.base.data = data

    def _merge(self, layer: torch.nn.Module, *_: object) -> None:
        for weight in () if self._disabled else self.layers[layer]:
            weight.merge()

    def _forget(self, layer: torch.nn.Module, *_: object) -> None:
        for weight in self.layers[layer]:
            weight.forget()


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
    scale = settings.alpha / settings.dim
    layers: dict[torch.nn.Module, list[AdaptedWeight]] = {}
    pieces_of = [_by_tensor(others) for others in siblings]
    for tensor, pieces in _by_tensor(slices).items():
        shared = dict.fromkeys(piece.name for others in pieces_of for piece in others.get(tensor, ()))
        match = _LAYER.fullmatch(tensor)
        if match is None or not any(is_target(name, settings) for name in shared):
            continue
        layer, module = _module(model, match[1]), _module(model, f"{match[1]}.{match[2]}")
        if layer not in layers:
            layer.add_module(ADAPTERS, LayerAdapters())
        base: torch.nn.Parameter = module.weight  # type: ignore[assignment]
        names = [name for name in shared if is_target(name, settings)]
        adapters = {name: _new_adapter(name, shapes[name], base, settings, seed) for name in names}
        for name, adapter in adapters.items():
            layer.get_submodule(ADAPTERS).add(name, adapter)  # type: ignore[operator]
        weight = AdaptedWeight(module, base, AdapterStack.of(base, pieces, adapters), scale)
        leave_weight_out(module, weight.running, scale)
        layers.setdefault(layer, []).append(weight)
    return Adapters(layers, scale)


Running = Callable[[], tuple[AdapterStack, Factors] | None]
"""Returns the adapters merged for the running pass, without gradients; None if the layer runs without adapters."""


def leave_weight_out(module: torch.nn.Module, running: Running, scale: float) -> None:
    """Makes a linear layer, whose weight is frozen or merged without a gradient, give its adapters their gradients."""

    def forward(input: Tensor, weight: Tensor, **options: Any) -> Tensor:  # Megatron's names
        output: Tensor = linear_with_frozen_weight(input, weight, **options)
        merged = running() if torch.is_grad_enabled() else None
        if merged is None:
            return output
        stack, factors = merged
        group = options["tp_group"] if options["sequence_parallel"] else None
        trained = [part for adapter in stack.adapters for part in adapter]
        result: Tensor = _AdapterGradients.apply(output, input, stack, *factors, scale, group, *trained)  # type: ignore[no-untyped-call]
        return result

    module.__dict__["_forward_impl"] = forward


class _AdapterGradients(torch.autograd.Function):
    """Passes the output on. With a `group` the input is this rank's part of the sequence, and the output has all of it."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        stack: AdapterStack,
        wide: Tensor,
        narrow: Tensor,
        scale: float,
        group: Any,
        *trained: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inputs, wide, narrow)
        ctx.stack, ctx.scale, ctx.group = stack, scale, group
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, wide, narrow = ctx.saved_tensors
        gradient, rows = gradients[0].flatten(0, -2), inputs.flatten(0, -2)
        hidden = rows @ narrow.t()  # [tokens, dim]
        of_hidden = gradient @ wide
        if ctx.group is not None:
            whole, part = torch.empty_like(of_hidden), torch.empty_like(hidden)
            dist.all_gather_into_tensor(whole, hidden, group=ctx.group)
            dist.reduce_scatter_tensor(part, of_hidden, group=ctx.group)
            hidden, of_hidden = whole, part
        of_wide, of_narrow = gradient.t() @ hidden.mul_(ctx.scale), of_hidden.mul_(ctx.scale).t() @ rows
        return gradients[0], None, None, None, None, None, None, *ctx.stack.gradients(of_wide, of_narrow)


def sum_adapter_gradients(chunks: list[Any], *_: Any, **__: Any) -> None:
    """Sums gradients over all ranks. Megatron's `finalize_model_grads` expects gradients of embeddings."""
    for chunk in chunks:
        chunk.finish_grad_sync()
    group = parallel_state.get_tensor_model_parallel_group()
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers) if dist.get_world_size(group) > 1 else ():
        dist.all_reduce(buffer.grad_data, group=group)


def _need_gradients(_: object, __: object, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _by_tensor(slices: Sequence[WeightSlice]) -> dict[str, list[WeightSlice]]:
    """Returns the pieces of each local matrix from top to bottom."""
    by_tensor: dict[str, list[WeightSlice]] = {}
    for piece in expand(slices):
        if len(piece.box) == 2:
            by_tensor.setdefault(piece.tensor, []).append(piece)
    return {tensor: sorted(pieces, key=lambda piece: piece.local) for tensor, pieces in by_tensor.items()}


def _module(model: ModelChunks, name: str) -> torch.nn.Module:
    stage, _, rest = name.partition(".")
    if stage.startswith("vp"):
        return model.chunks[int(stage[2:])].get_submodule(rest)  # type: ignore[no-any-return]
    return model.chunks[0].get_submodule(name)  # type: ignore[no-any-return]


def _new_adapter(name: str, shape: Sequence[int], base: torch.nn.Parameter, settings: PeftConfig, seed: int) -> Adapter:
    values = first_factors(name, shape, settings, seed)
    a, b = (torch.nn.Parameter(value.to(device=base.device, dtype=base.dtype)) for value in values)
    return a, b
