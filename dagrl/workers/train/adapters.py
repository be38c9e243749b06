"""LoRA adapters: which parameters have one, files in PEFT's format, and the slices of a refit that sends adapters alone.

In a refit a parameter `q_proj.weight` [outputs, inputs] has A, `q_proj.lora_A.weight` [dim, inputs], and B,
`q_proj.lora_B.weight` [outputs, dim]. B is sent times the scale of the adapters, as vLLM's LoRA slots expect it. Train
workers hold A and B of the parameters that they have a part of, whole. In PEFT's `adapter_model.safetensors` the names begin
with `base_model.model`. Experts have one A and B each, in one tensor: [experts, dim, inputs] and [experts, outputs, dim].
Needs neither Megatron nor PEFT; imports torch only to read and write files.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.config import PeftConfig
from dagrl.errors import CheckpointError, ConfigError
from dagrl.refit.slices import WeightSlice
from dagrl.workers.train.hf_load import opened

if TYPE_CHECKING:
    from torch import Tensor

AdapterShapes = Mapping[str, tuple[int, ...]]  # full shape of each parameter of the base model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "policy.peft"
_LINEAR = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # latent attention
)


def is_target(name: str, settings: PeftConfig) -> bool:
    """Whether the parameter `name` has an adapter."""
    return _is_linear(name) and is_chosen(name, settings)


def is_chosen(name: str, settings: PeftConfig) -> bool:
    """Whether a linear layer's parameter has an adapter. Targets match whole names at the end, as in PEFT."""
    names = settings.target_modules
    return not names or any(_matches(name, target) for target in names)


def is_chosen_parameter(name: str, settings: PeftConfig) -> bool:
    """Whether a parameter with the weights of all experts of a layer has adapters."""
    return any(_matches(name, target) for target in settings.target_parameters)


def first_factors(name: str, shape: Sequence[int], settings: PeftConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the A [dim, inputs] and B [outputs, dim] with which training begins, the same in any layout and backend.

    Those of experts have one dimension more, as `shape` has.
    """
    import torch

    *experts, outputs, inputs = shape
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    bound = 1 / math.sqrt(inputs)  # PEFT's kaiming_uniform_(a=sqrt(5))
    a = torch.empty(*experts, settings.dim, inputs).uniform_(-bound, bound, generator=generator)
    return a, torch.zeros(*experts, outputs, settings.dim)


def linear_shapes(shapes: AdapterShapes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of those parameters that may have adapters: linear layers, by name, outside of experts."""
    return {name: shape for name, shape in shapes.items() if _is_linear(name)}


def check_adapters(settings: PeftConfig, linear: AdapterShapes, experts: AdapterShapes | None = None) -> None:
    """Raises ConfigError for a target that the model does not have, CheckpointError for adapters of another model.

    `linear`: the shapes of all parameters of linear layers that may have adapters. `experts`: those of experts, [experts,
    outputs, inputs].
    """
    experts = experts or {}
    for target in settings.target_parameters:
        if not any(_matches(name, target) for name in experts):
            known = dict.fromkeys(".".join(name.split(".")[-2:]) for name in experts)
            raise ConfigError(
                f"{KEY}.target_parameters has {target!r}, which no weight of experts is called; expected "
                f"{', '.join(known) or 'none: the model has no experts that can have adapters'}"
            )
    names = list(linear)
    for target in settings.target_modules:
        if not any(_matches(name, target) for name in names):
            known = dict.fromkeys(_module(name).rpartition(".")[2] for name in names)
            raise ConfigError(
                f"{KEY}.target_modules has {target!r}, which no linear layer outside of experts is called; expected "
                f"{', '.join(known)}, or the end of a longer name such as {_module(names[0])!r}"
            )
    if settings.adapter_path is not None:
        _check_config(Path(settings.adapter_path), settings)
        _check_shapes(Path(settings.adapter_path), settings, linear, experts)


def read_adapters(directory: str | Path, adapters: Mapping[str, Sequence[Tensor]]) -> None:
    """Fills A and B of each parameter in `adapters` from a directory that `check_adapters` accepts."""
    from safetensors import safe_open

    with safe_open(Path(directory) / WEIGHTS, framework="pt") as file:
        for name, (a, b) in adapters.items():
            for key, tensor in zip(_keys(name, adapters), (a, b.movedim(0, -1) if b.ndim == 3 else b), strict=True):
                tensor.copy_(file.get_tensor(key).view(tensor.shape))


def write_adapters(directory: Path, base: str, settings: PeftConfig, adapters: Mapping[str, Sequence[Tensor]]) -> None:
    """Writes all adapters of the model for `PeftModel.from_pretrained`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: part
        for name, factors in adapters.items()
        for key, part in zip(_keys(name, adapters), _flat(*factors), strict=True)
    }
    layers = {_module(name).rpartition(".")[2] for name in adapters if name.endswith(".weight")}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.dim,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(settings.target_modules) or sorted(layers),
        "target_parameters": list(settings.target_parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def adapter_names(parameter: str) -> tuple[str, str]:
    """Returns the names of a parameter's A and B in a refit."""
    module = parameter.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def targets(linear: AdapterShapes, settings: PeftConfig) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of `linear` that have adapters."""
    return {name: shape for name, shape in linear.items() if is_chosen(name, settings)}


def trained_adapters(slices: Sequence[WeightSlice], adapted: AdapterShapes, settings: PeftConfig) -> list[WeightSlice]:
    """Returns the adapters of a train worker whose weights are `slices`. `adapted`: see `targets`."""
    adapter_slices: dict[WeightSlice, None] = {}
    for piece in slices:
        if piece.name in adapted:
            outputs, inputs = adapted[piece.name]
            shapes = (settings.dim, inputs), (outputs, settings.dim)
            for name, sizes in zip(adapter_names(piece.name), shapes, strict=True):
                box = tuple((0, size) for size in sizes)
                adapter_slices[WeightSlice(name, box, name, box)] = None
    return list(adapter_slices)


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and ".experts." not in name and _module(name).rpartition(".")[2] in _LINEAR


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _matches(name: str, target: str) -> bool:
    return f".{_module(name)}".endswith(f".{target}")


def _keys(name: str, adapters: Collection[str]) -> tuple[str, str]:
    """Returns PEFT's names of A and B. Of several parameters of a module each wraps those before it."""
    module = _module(name)
    if not name.endswith(".weight"):
        module = name.rpartition(".")[0]
        several = [other for other in adapters if other.rpartition(".")[0] == module]
        module += ".base_layer" * (len(several) - 1 - several.index(name))
    a, b = adapter_names(module)
    return f"base_model.model.{a}", f"base_model.model.{b}"


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns A and B as PEFT has them: of experts A [experts * dim, inputs] and B [outputs, dim * experts]."""
    return (a.flatten(0, 1), b.movedim(0, -1).flatten(1).contiguous()) if a.ndim == 3 else (a, b)


def _check_config(directory: Path, settings: PeftConfig) -> None:
    try:
        saved = json.loads((directory / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {directory / CONFIG}: {error}; {KEY}.adapter_path must be a directory that PEFT or dagrl wrote"
        ) from error
    for name, key, value in (("r", "dim", settings.dim), ("lora_alpha", "alpha", settings.alpha)):
        if saved.get(name) != value:
            raise CheckpointError(
                f"{directory / CONFIG} has {name} {saved.get(name)}, but {KEY}.{key} is {value}; set "
                f"{KEY}.{key}={saved.get(name)}"
            )
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "use_dora", "use_rslora"):
        if saved.get(name):
            raise CheckpointError(f"{directory / CONFIG} has {name}, which dagrl does not train; expected LoRA")


def _check_shapes(directory: Path, settings: PeftConfig, linear: AdapterShapes, experts: AdapterShapes) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    stacked = [name for name in experts if is_chosen_parameter(name, settings)]
    for name, shape in (targets(linear, settings) | {name: experts[name] for name in stacked}).items():
        *count, outputs, inputs = shape
        dim = settings.dim * math.prod(count)
        expected |= zip(_keys(name, stacked), ((dim, inputs), (outputs, dim)), strict=True)
    path = directory / WEIGHTS
    with opened(path) as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    for key in {**expected, **saved}:
        if expected.get(key) != saved.get(key):
            raise CheckpointError(
                f"{path}: {key!r} has shape {saved.get(key, 'none')}, expected {expected.get(key, 'none')} for this model "
                f"and {KEY}.target_modules; choose the targets that the adapters were trained with, on the same base model"
            )
