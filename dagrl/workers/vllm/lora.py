"""Refits of LoRA adapters alone: one slot of vLLM's LoRA layers, always active, whose memory a refit writes.

The slot gets an adapter of zeros when the engine has started, and every request names it. vLLM's own code that fills a slot
(`set_lora` of its LoRA layers) runs over recording tensors and gives the destinations: slices of fused layers, tensor
parallelism. The base weights stay as loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from dagrl.config import Config, Json, PeftConfig
from dagrl.config.settings import SLOT_RANKS, sends_adapters
from dagrl.errors import ConfigError
from dagrl.machine import gpu_count
from dagrl.workers.families.decoder import EXPERT_TYPES, MODEL_TYPES
from dagrl.workers.megatron.weights import stacked_shapes
from dagrl.workers.train.adapters import KEY, AdapterShapes, adapter_names, linear_shapes, targets
from dagrl.workers.vllm import features
from dagrl.workers.vllm.destinations import Destinations
from dagrl.workers.vllm.quantization import in_fp8

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from vllm.lora.request import LoRARequest

    from dagrl.refit.recording import Recording  # imports torch

SLOT, ADAPTER = 0, 1  # the slot, and vLLM's number of the adapter in it


def lora_arguments(config: Config, hf_config: Mapping[str, Json]) -> dict[str, Any]:
    """Returns vLLM's engine arguments for one LoRA slot; none if refits send merged weights."""
    if not sends_adapters(config):
        return {}
    peft = config.policy.peft
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in SLOT_RANKS if rank >= peft.dim),
        "load_format": "auto",  # a refit writes none of the loaded parameters
    }
    names = map(_names(hf_config), targets(_linear_layers(hf_config), peft))
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    for architecture in _model_classes(hf_config):
        packed = getattr(architecture, "packed_modules_mapping", {})
        modules |= {layer for layer, parts in packed.items() if modules.intersection(parts)}
    # Other layers have no slot: those of the head would change how logits are computed.
    return arguments | features.only_known({"lora_target_modules": sorted(modules)})


def _linear_layers(hf_config: Mapping[str, Json]) -> AdapterShapes:
    """Returns the shapes of the parameters that may have adapters."""
    if hf_config.get("model_type") in MODEL_TYPES:
        return linear_shapes(stacked_shapes(hf_config))
    return _shapes_of_model(json.dumps(hf_config))


@cache
def _shapes_of_model(hf_config: str) -> AdapterShapes:
    """Found before the engine starts: an engine may have changed transformers' class."""
    from dagrl.workers.fsdp.lora import shapes_of_model

    return shapes_of_model(json.loads(hf_config))


def _names(hf_config: Mapping[str, Json]) -> Callable[[str], str]:
    """Returns what gives the name of a parameter in vLLM. Imports the model's class."""
    return next((features.names_in_vllm(architecture) for architecture in _model_classes(hf_config)), str)


def _model_classes(hf_config: Mapping[str, Json]) -> Iterator[type[Any]]:
    from vllm import ModelRegistry

    for name in cast(list[str], hf_config.get("architectures") or []):
        if name in ModelRegistry.models:
            yield ModelRegistry.models[name].load_model_cls()


def check_slots(config: Config, hf_config: Mapping[str, Json]) -> None:
    """Raises ConfigError before any actor starts if vLLM has no LoRA slots for the model."""
    if in_fp8(config, hf_config):
        raise ConfigError(f"{KEY}.refit is adapters, but the checkpoint is in FP8; set {KEY}.refit=merged")
    on_cpu = not gpu_count() and config.cluster.address is None
    if on_cpu and hf_config.get("model_type") in EXPERT_TYPES:
        raise ConfigError(
            f"{KEY}.refit is adapters, but vLLM's kernels for experts on CPUs run in no model with LoRA; set it to merged"
        )


def lora_request() -> LoRARequest:
    """Returns what a request names to run with the slot."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER, "filled by refits")


def fill_slot(worker: Any, dim: int) -> Any:
    """Puts an adapter of zeros into the slot, where it stays. Returns vLLM's manager of LoRA layers.

    Runs inside vLLM's worker.
    """
    manager = worker.model_runner.lora_manager
    manager.add_dummy_lora(lora_request(), rank=dim)
    manager.pin_adapter(ADAPTER)  # also activates it
    layers = manager._adapter_manager
    assert layers.lora_index_to_id[SLOT] == ADAPTER
    return layers


def find_slots(layers: Any, hf_config: Mapping[str, Json], settings: PeftConfig, dtype: torch.dtype) -> Destinations:
    """Returns the destinations of a refit of adapters in vLLM's LoRA layers.

    Raises ConfigError if vLLM has no slot for one of the adapters.
    """
    from dagrl.refit.recording import record

    shapes, in_vllm = _linear_layers(hf_config), _names(hf_config)
    adapted = targets(shapes, settings)
    slots = _Slots(layers, {in_vllm(name): name for name in shapes})
    checkpoint = [weight for name, shape in adapted.items() for weight in _checkpoint(name, shape, settings.dim, dtype)]
    recording = record(slots.memory(), checkpoint, dtype, lambda sources: slots.fill(dict(sources)))
    _check_complete(type(layers.model).__name__, recording, adapted, slots)
    tensors = {weight.tensor: slots.tensors[weight.tensor] for weight in recording.slices}
    return Destinations(recording.slices, tensors, ())


def _checkpoint(
    name: str, shape: Sequence[int], dim: int, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    outputs, inputs = shape
    for part, sizes in zip(adapter_names(name), ((dim, inputs), (outputs, dim)), strict=True):
        yield part, sizes, dtype


@dataclass(frozen=True)
class _Slots:
    """vLLM's LoRA layers; `names` are Hugging Face parameters by vLLM's names."""

    layers: Any
    names: Mapping[str, str]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The slot's memory by local name."""
        return {
            f"{module}.lora_{kind}.{number}": stack[SLOT, 0]
            for module, layer in self._linear()
            for kind in "ab"
            for number, stack in enumerate(getattr(layer, f"lora_{kind}_stacked"))
        }

    def _linear(self) -> Iterator[tuple[str, Any]]:
        """Yields the layers by name; not those of experts, which vLLM may have wrapped too."""
        return ((name, layer) for name, layer in self.layers.modules.items() if hasattr(layer, "lora_a_stacked"))

    def memory(self) -> torch.nn.Module:
        """Returns a module with the slot's memory as buffers, for the recorder."""
        import torch

        module = torch.nn.Module()
        module._buffers.update(self.tensors)  # `register_buffer` takes no names with dots
        return module

    def fill(self, sources: Mapping[str, Tensor]) -> None:
        """Fills the slot from A and B by name, as vLLM does with an adapter that it loads."""
        for module, layer in self._linear():
            children = self.layers.packed_modules.get(module, [module])
            pairs = [self._pair(f"{child}.weight", sources) for child in children]
            if any(pair is not None for pair in pairs):
                a, b = ([pair and pair[side] for pair in pairs] for side in range(2))
                layer.set_lora(SLOT, *((a, b) if len(pairs) > 1 else (a[0], b[0])))

    def _pair(self, name: str, sources: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        a, b = (sources.get(part) for part in adapter_names(self.names.get(name, name)))
        return None if a is None or b is None else (a, b)


def _check_complete(model: str, recording: Recording, adapted: AdapterShapes, slots: _Slots) -> None:
    """Raises ConfigError unless every adapter has its slot on this rank."""
    names = {weight.name for weight in recording.slices}
    lacking = [name for name in adapted if not names.issuperset(adapter_names(name))]
    if lacking or recording.arranged or recording.refused:
        which = ", ".join(repr(name) for name in (lacking or [*recording.refused, *recording.arranged])[:3])
        raise ConfigError(
            f"vLLM's {model} has no LoRA slot that a refit can write for {which}; choose other "
            f"{KEY}.target_modules, or set {KEY}.refit=merged"
        )
