"""LoRA adapters of a sharded model, by PEFT's layers.

`add_adapters` wraps linear layers before FSDP2 shards the model, A and B like other weights. Experts, which transformers
stacks in one parameter, have theirs as parameters of the same module (`experts.py`). Frozen weights are in
`policy.precision`, adapters in float32. A refit sends merged weights, of which each rank computes its shards, or the
adapters, whole. Imported only where torch is.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

from dagrl.config import Json, PeftConfig, PolicyConfig
from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice
from dagrl.refit.sources import held_boxes, local_of
from dagrl.workers.fsdp.architecture import find_class, find_config, vision_tower
from dagrl.workers.fsdp.experts import SCALE, expert_weights, factor_names
from dagrl.workers.train.adapters import (
    adapter_names,
    check_adapters,
    first_factors,
    is_chosen,
    is_chosen_parameter,
    read_adapters,
)

NAME = "default"  # PEFT's name of the adapter


@dataclass(frozen=True)
class LayerAdapter:
    """That of a linear layer: W + scale * B @ A, with A [dim, inputs] and B [outputs, dim]."""

    layer: Any
    scale: float

    @property
    def weight(self) -> Any:
        """The frozen weight, a DTensor if the model is sharded."""
        return self.layer.get_base_layer().weight

    @property
    def factors(self) -> tuple[Any, Any]:
        """A and B, sharded as the weight is."""
        return self.layer.lora_A[NAME].weight, self.layer.lora_B[NAME].weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of B @ A."""
        return tuple(self.weight.shape)

    def enable(self, enabled: bool) -> None:
        """Makes passes run with the adapter, or without it."""
        self.layer.enable_adapters(enabled)

    def merged(self) -> Tensor:
        """Returns this rank's part of the weight with the adapter, in float32. A collective.

        B is sharded as the rows of the weight are, and A is split as its columns are over tensor-parallel ranks.
        """
        a, b = self.factors
        if isinstance(a, DTensor):
            columns = [place if place.is_shard(1) else Replicate() for place in a.placements]
            a = a.redistribute(placements=columns)
        frozen = local_of(self.weight).float()
        return frozen.addmm(local_of(b), local_of(a), alpha=self.scale)


@dataclass(frozen=True)
class ExpertAdapter:
    """Those of all experts of a layer, as a `LayerAdapter`: A [experts, dim, inputs] and B [experts, outputs, dim].

    `run_experts` computes with them. Each rank has whole experts.
    """

    experts: Any
    name: str
    scale: float

    @property
    def weight(self) -> Any:
        return getattr(self.experts, self.name)

    @property
    def factors(self) -> tuple[Any, Any]:
        a, b = factor_names(self.name)
        return getattr(self.experts, a), getattr(self.experts, b)

    @property
    def shape(self) -> tuple[int, ...]:
        return expert_shape(self.experts, self.name)

    def enable(self, enabled: bool) -> None:
        setattr(self.experts, SCALE, self.scale if enabled else 0.0)  # for all adapters of the module

    def merged(self) -> Tensor:
        a, b = map(local_of, self.factors)
        left, right = (a.mT, b.mT) if self.experts.is_transposed else (b, a)
        return torch.baddbmm(local_of(self.weight).float(), left, right, alpha=self.scale)


Adapter = LayerAdapter | ExpertAdapter


def whole_factors(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Returns A and B whole. A collective."""
    a, b = (one.full_tensor() if isinstance(one, DTensor) else one for one in map(torch.detach, adapter.factors))
    return a, b


class Adapters:
    """The adapters of a model, by the name of the parameter that each is for."""

    def __init__(self, net: nn.Module, settings: PeftConfig) -> None:
        self._settings = settings
        layers = ((name, layer) for name, layer in net.named_modules() if _has_adapter(layer))
        self.held: dict[str, Adapter] = {f"{name}.weight": LayerAdapter(one, one.scaling[NAME]) for name, one in layers}
        scale = settings.alpha / settings.dim
        self.held |= {
            name: ExpertAdapter(experts, own, scale)
            for name, (experts, own) in expert_weights(net).items()
            if is_chosen_parameter(name, settings)
        }

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Fills A and B: from `adapter_path`, else A at random and B with zeros, the same in every layout."""
        whole = {name: first_factors(name, one.shape, self._settings, seed) for name, one in self.held.items()}
        if self._settings.adapter_path is not None:
            read_adapters(self._settings.adapter_path, whole)
        for name, adapter in self.held.items():
            for factor, value in zip(adapter.factors, whole[name], strict=True):
                for box, at in held_boxes(name, factor):
                    local_of(factor)[tuple(slice(*run) for run in at)] = value[tuple(slice(*run) for run in box)]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the block with the base model."""
        for adapter in self.held.values():
            adapter.enable(False)
        try:
            yield
        finally:
            for adapter in self.held.values():
                adapter.enable(True)

    def sent_slices(self) -> list[WeightSlice]:
        """Returns the slices of a refit of adapters alone, which every rank holds whole."""
        boxes = {
            part: tuple((0, size) for size in factor.shape)
            for name, adapter in self.held.items()
            for part, factor in zip(adapter_names(name), adapter.factors, strict=True)
        }
        return [WeightSlice(part, box, part, box) for part, box in boxes.items()]

    @torch.no_grad()
    def sent(self) -> dict[str, Tensor]:
        """Returns A, and B times its scale, whole, by their names in a refit. A collective."""
        tensors: dict[str, Tensor] = {}
        for name, adapter in self.held.items():
            a, b = whole_factors(adapter)
            tensors |= zip(adapter_names(name), (a, b * adapter.scale), strict=True)
        return tensors


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model is a factor of an adapter."""
    return ".lora_" in name


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def linear_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that may have adapters: those of all linear layers but the head.

    A model that takes images has them in its language part alone, as vLLM has.
    """
    inside = {*(model if vision_tower(model) is None else model.get_decoder()).modules()} - {model.get_output_embeddings()}
    layers = ((name, part) for name, part in model.named_modules() if _is_linear(part) and part in inside)
    return {f"{name}.weight": tuple(part.weight.shape) for name, part in layers}


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module multiplies by one matrix. Subclasses may do something else, as DeepSeek V4's groups."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def shapes_of_model(hf_config: Mapping[str, Json]) -> dict[str, tuple[int, ...]]:
    """Returns the `linear_shapes` of the model with this `config.json`."""
    config = find_config(PolicyConfig(), hf_config, scalar=False)
    with torch.device("meta"):
        return linear_shapes(find_class(PolicyConfig(), config, scalar=False)(config))


def expert_shape(experts: Any, name: str) -> tuple[int, ...]:
    """Returns the shape [experts, outputs, inputs] of one of a module's weights, in whatever order it has them."""
    count, rows, columns = getattr(experts, name).shape
    return (count, columns, rows) if experts.is_transposed else (count, rows, columns)


def add_adapters(model: nn.Module, settings: PeftConfig) -> None:
    """Wraps the linear layers that `settings` choose, and adds parameters to experts. A and B are float32, the frozen
    weights as they were.

    Raises a UserError for targets or saved adapters that do not fit the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    experts = {name: expert_shape(*place) for name, place in expert_weights(model).items()}
    check_adapters(settings, linear_shapes(model), experts)
    lora = LoraConfig(r=settings.dim, lora_alpha=settings.alpha, target_modules=_chosen_layers(model, settings))  # type: ignore[arg-type]
    apart = nn.ModuleDict({"net": model})  # from its configuration PEFT takes `up_proj` for experts, as of older checkpoints
    inject_adapter_in_model(lora, apart, NAME)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
    for name, place in expert_weights(model).items():
        if is_chosen_parameter(name, settings):
            _add_expert_adapters(*place, experts[name], settings)


def _add_expert_adapters(experts: nn.Module, name: str, shape: tuple[int, ...], settings: PeftConfig) -> None:
    count, outputs, inputs = shape
    device = getattr(experts, name).device
    for factor, size in zip(factor_names(name), ((settings.dim, inputs), (outputs, settings.dim)), strict=True):
        experts.register_parameter(factor, nn.Parameter(torch.empty(count, *size, dtype=torch.float32, device=device)))
    setattr(experts, SCALE, settings.alpha / settings.dim)


def split_adapters(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Splits the adapters of layers that `plan` splits over tensor-parallel ranks: B as rows are, or A as columns are."""
    from peft.tuners.lora.model import add_lora_tp_hooks_dtensor

    for name, layer in model.named_modules():
        style = plan.get(replace_layer_number_by_wildcard(name)) if _has_adapter(layer) else None
        if style is None:
            continue
        if style not in ("colwise", "rowwise"):
            able = {layer.rpartition(".")[2] for layer, style in plan.items() if style in ("colwise", "rowwise")}
            raise ConfigError(
                f"policy.peft is for {name} too, which tensor parallelism splits as {style!r}, and adapters only as colwise "
                f"or rowwise; set policy.peft.target_modules to other layers, such as [{', '.join(sorted(able))}], or "
                "policy.fsdp_cfg.tensor_parallel_size to 1"
            )
        factor: Any = (layer.lora_B if style == "colwise" else layer.lora_A)[NAME]
        add_lora_tp_hooks_dtensor(factor, style, mesh, base_layer=layer.get_base_layer(), module_name=name)


def moved_names(kind: type[Any], config: Any, settings: PeftConfig) -> dict[str, str]:
    """Returns the names that parameters of a checkpoint have next to adapters, as patterns for `from_pretrained`."""
    with torch.device("meta"):
        layers = _chosen_layers(kind(config), settings)
    return {f"^{re.escape(layer)}[.](weight|bias)$": rf"{layer}.base_layer.\1" for layer in layers}


def _chosen_layers(model: nn.Module, settings: PeftConfig) -> list[str]:
    return [name.removesuffix(".weight") for name in linear_shapes(model) if is_chosen(name, settings)]


def plain_view(module: nn.Module) -> nn.Module:
    """Returns a model that shares the parameters, in which linear layers are in place of their adapters."""
    if _has_adapter(module):
        base: nn.Module = module.get_base_layer()  # type: ignore[operator]
        return base
    kind: Any = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    view: nn.Module = kind.__new__(kind)
    view.__dict__ = dict(module.__dict__)
    view._parameters = {name: one for name, one in module._parameters.items() if not is_adapter(f".{name}")}
    view._modules = {name: None if child is None else plain_view(child) for name, child in module._modules.items()}
    return view
