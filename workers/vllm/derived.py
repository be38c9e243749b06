"""Tensors that vLLM computes from others after a load, and that a refit must have recomputed: a hook for each rule.

Which there are is part of a family (`workers.families.model.Derived`); how each is recomputed is here. New values go into
the memory of the old ones, at which kernels and CUDA graphs point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError
from workers.families.kv_scales import VLLM_RULE
from workers.families.model import Derived

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Hook:
    """Something to recompute from the destination tensors after a write; `name` says what."""

    name: str
    run: Callable[[], None]


@dataclass(frozen=True)
class DerivedTensors:
    """`inputs` are destination tensors that vLLM does not keep itself, by local name; `hooks` recompute what it does."""

    inputs: dict[str, torch.Tensor]
    hooks: list[Hook]


def derive(model: torch.nn.Module, rules: Sequence[Derived], dtype: torch.dtype) -> DerivedTensors:
    """Inputs and hooks of all rules for a loaded model; `dtype` is that in which it computes."""
    found = DerivedTensors({}, [])
    for rule in rules:
        _RULES[rule.rule](model, rule, dtype, found)
    return found


def _negative_exponential(model: torch.nn.Module, rule: Derived, dtype: torch.dtype, found: DerivedTensors) -> None:
    """Mamba's `A = -exp(A_log)` in float32; vLLM keeps `A` alone (`mamba_mixer2.py`)."""
    import torch

    module: Any = model.get_submodule(rule.module)
    for name in rule.tensors:
        result = getattr(module, name).data
        logarithm = torch.log(-result.float())
        found.inputs[f"{rule.module}.{name}_log"] = logarithm
        found.hooks.append(Hook(f"recompute {rule.module}.{name}", partial(_write_exponential, logarithm, result)))


def _write_exponential(logarithm: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(-logarithm.exp())


def _absorbed_kv(model: torch.nn.Module, rule: Derived, dtype: torch.dtype, found: DerivedTensors) -> None:
    """MLA's `W_UV` and `W_UK_T` from `kv_b_proj` (`layers/attention/mla_attention.py`)."""
    module: Any = model.get_submodule(rule.module)
    held = {name: getattr(module, name) for name in rule.tensors if hasattr(module, name)}
    if held:  # a backend that keeps others of its own refills them in place
        found.hooks.append(Hook(f"recompute {', '.join(held)} of {rule.module}", partial(_absorb, module, held, dtype)))
    elif not hasattr(module, "W_K"):
        raise ConfigError(
            f"vLLM's {rule.module!r} has none of {', '.join(rule.tensors)} after loading; this attention backend keeps its "
            "projections elsewhere, and a refit could not update them: choose another attention backend "
            "(policy.generation.vllm_kwargs.attention_backend)"
        )


def _absorb(module: Any, held: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    import torch

    with torch.no_grad():
        module.process_weights_after_loading(dtype)
        for name, old in held.items():
            new = getattr(module, name)
            if new is not old:
                old.copy_(new)
                setattr(module, name, old)


def _kv_scales(model: torch.nn.Module, rule: Derived, dtype: torch.dtype, found: DerivedTensors) -> None:
    """Scales of a KV cache in FP8 (`layers/attention/attention.py`, `layers/quantization/kv_cache.py`)."""
    import torch

    module: Any = model.get_submodule(rule.module)
    if not str(module.kv_cache_dtype).startswith("fp8"):
        raise ConfigError(
            f"vLLM's {rule.module!r} has a KV cache of {module.kv_cache_dtype!r}, though fp8 was asked for and a refit has "
            "scales for every layer; use a model without layers that vLLM leaves out"
        )
    backend = module.attn_backend.get_name()
    if backend not in _SCALES_IN_MEMORY:
        raise ConfigError(
            f"the attention backend {backend} takes the scales of its FP8 KV cache as numbers, which CUDA graphs keep; "
            f"choose one of {', '.join(_SCALES_IN_MEMORY)} (policy.generation.vllm_kwargs.attention_backend)"
        )
    scales = torch.ones(2, dtype=torch.float32, device=module._k_scale.device)
    for index, name in enumerate(rule.tensors):
        found.inputs[f"{rule.module}.{name}"] = scales[index : index + 1]
    found.hooks.append(Hook(f"scale the KV cache of {rule.module}", partial(_write_kv_scales, module, scales)))


def _write_kv_scales(module: Any, scales: torch.Tensor) -> None:
    """On the device, for kernels; as numbers and on the host, for what runs without a graph."""
    for name, tensor, number in zip(("k", "v"), scales, scales.tolist(), strict=True):
        getattr(module, f"_{name}_scale").copy_(tensor)
        setattr(module, f"_{name}_scale_float", number)
        getattr(module, f"_{name}_scale_cpu").fill_(number)


_SCALES_IN_MEMORY = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that read the scales from the device, or that no CUDA graph holds."""

_RULES: dict[str, Callable[[torch.nn.Module, Derived, torch.dtype, DerivedTensors], None]] = {
    "negative_exponential": _negative_exponential,
    "absorbed_kv": _absorbed_kv,
    VLLM_RULE: _kv_scales,
}
