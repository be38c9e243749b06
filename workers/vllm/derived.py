"""Tensors that vLLM computes from others after loading (MLA's absorbed weights, Mamba's `A`, KV scales).

A refit must recompute them. The rules that a family has are `dagrl.workers.families.family.DerivedRule`; this module has a
hook for each. New values are written into the old memory, because kernels and CUDA graphs point there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError
from dagrl.workers.families.family import DerivedRule
from dagrl.workers.families.kv_scales import VLLM_RULE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RefitHook:
    """Recomputes tensors from the destination tensors after a write. `name` describes it in errors."""

    name: str
    run: Callable[[], None]


@dataclass(frozen=True)
class DerivedTensors:
    """`inputs` are destination tensors that vLLM does not keep, by local name. `hooks` recompute from them what it keeps."""

    inputs: dict[str, torch.Tensor]
    hooks: list[RefitHook]


def derive(model: torch.nn.Module, rules: Sequence[DerivedRule], dtype: torch.dtype) -> DerivedTensors:
    """Returns inputs and hooks of all rules for a loaded model that computes in `dtype`."""
    found = DerivedTensors({}, [])
    for rule in rules:
        _RULES[rule.rule](model, rule, dtype, found)
    return found


def _negative_exponential(model: torch.nn.Module, rule: DerivedRule, dtype: torch.dtype, found: DerivedTensors) -> None:
    """Adds Mamba's `A = -exp(A_log)` in float32; vLLM keeps only `A` (`mamba_mixer2.py`)."""
    import torch

    module: Any = model.get_submodule(rule.module)
    for name in rule.tensors:
        result = getattr(module, name).data
        logarithm = torch.log(-result.float())
        found.inputs[f"{rule.module}.{name}_log"] = logarithm
        found.hooks.append(RefitHook(f"recompute {rule.module}.{name}", partial(_write_exponential, logarithm, result)))


def _write_exponential(logarithm: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(-logarithm.exp())


def _absorbed_kv(model: torch.nn.Module, rule: DerivedRule, dtype: torch.dtype, found: DerivedTensors) -> None:
    """Adds MLA's `W_UV` and `W_UK_T` from `kv_b_proj` (`layers/attention/mla_attention.py`)."""
    module: Any = model.get_submodule(rule.module)
    held = {name: getattr(module, name) for name in rule.tensors if hasattr(module, name)}
    if held:  # backends with additional tensors refill those in place
        found.hooks.append(RefitHook(f"recompute {', '.join(held)} of {rule.module}", partial(_absorb, module, held, dtype)))
    elif not hasattr(module, "W_K"):
        raise ConfigError(
            f"vLLM's {rule.module!r} has none of {', '.join(rule.tensors)} after loading. This attention backend keeps its "
            "projections elsewhere, where a refit cannot update them; choose another attention backend "
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


def _kv_scales(model: torch.nn.Module, rule: DerivedRule, dtype: torch.dtype, found: DerivedTensors) -> None:
    """Adds scales of an FP8 KV cache (`layers/attention/attention.py`, `layers/quantization/kv_cache.py`)."""
    import torch

    module: Any = model.get_submodule(rule.module)
    if not str(module.kv_cache_dtype).startswith("fp8"):
        raise ConfigError(
            f"vLLM's {rule.module!r} has a KV cache in {module.kv_cache_dtype!r}, but fp8 was requested and a refit "
            "has scales for every layer. vLLM does not quantize this layer's cache; use another model or kv_cache_dtype=auto"
        )
    backend = module.attn_backend.get_name()
    if backend not in _SCALES_IN_MEMORY:
        raise ConfigError(
            f"the attention backend {backend} takes the scales of its FP8 KV cache as numbers, which CUDA graphs freeze; "
            f"choose one of {', '.join(_SCALES_IN_MEMORY)} (policy.generation.vllm_kwargs.attention_backend)"
        )
    scales = torch.ones(2, dtype=torch.float32, device=module._k_scale.device)
    for index, name in enumerate(rule.tensors):
        found.inputs[f"{rule.module}.{name}"] = scales[index : index + 1]
    found.hooks.append(RefitHook(f"scale the KV cache of {rule.module}", partial(_write_kv_scales, module, scales)))


def _write_kv_scales(module: Any, scales: torch.Tensor) -> None:
    """Writes the scales to the device for kernels, and as numbers and to the host for eager code."""
    for name, tensor, number in zip(("k", "v"), scales, scales.tolist(), strict=True):
        getattr(module, f"_{name}_scale").copy_(tensor)
        setattr(module, f"_{name}_scale_float", number)
        getattr(module, f"_{name}_scale_cpu").fill_(number)


_SCALES_IN_MEMORY = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that read the scales from the device, or run without CUDA graphs."""

_RULES: dict[str, Callable[[torch.nn.Module, DerivedRule, torch.dtype, DerivedTensors], None]] = {
    "negative_exponential": _negative_exponential,
    "absorbed_kv": _absorbed_kv,
    VLLM_RULE: _kv_scales,
}
