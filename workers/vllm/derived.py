"""Tensors that vLLM computes from others after loading: MLA's absorbed weights, and the scales of an FP8 KV cache.

A refit must recompute them, with a hook for each. New values are written into the old memory, because kernels and CUDA
graphs point there. What a loader computes (Mamba's `A`) is recorded with the loader; see `recording.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError
from dagrl.workers.families.kv_scales import KINDS

if TYPE_CHECKING:
    import torch


ABSORBED = ("W_UV", "W_UK_T")
"""Attributes of MLA attention."""


RefitHook = Callable[[], object]
"""Recomputes tensors from the destination tensors after a write."""


def derive(
    model: torch.nn.Module, scaled: Sequence[str], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], list[RefitHook]]:
    """Returns destination tensors that vLLM does not keep, by local name, and hooks, for a model that computes in `dtype`.

    `scaled` are the attention modules with an FP8 KV cache whose scales a refit sends.
    """
    from vllm.model_executor.layers.attention import MLAAttention

    latent = [(name, module) for name, module in model.named_modules() if isinstance(module, MLAAttention)]
    hooks = [hook for name, module in latent for hook in _absorbed_kv(name, module, dtype)]
    inputs = dict[str, "torch.Tensor"]()
    return inputs, hooks + [_kv_scales(name, model.get_submodule(name), inputs) for name in scaled]


def _absorbed_kv(name: str, module: Any, dtype: torch.dtype) -> Iterator[RefitHook]:
    """Yields a hook for MLA's `W_UV` and `W_UK_T`, computed from `kv_b_proj` (`layers/attention/mla_attention.py`)."""
    held = {attribute: getattr(module, attribute) for attribute in ABSORBED if hasattr(module, attribute)}
    if held:  # backends with additional tensors refill those in place
        yield partial(_absorb, module, held, dtype)
    elif not hasattr(module, "W_K"):
        raise ConfigError(
            f"vLLM's {name!r} has none of {', '.join(ABSORBED)} after loading. This attention backend keeps its "
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


def _kv_scales(name: str, module: Any, inputs: dict[str, torch.Tensor]) -> RefitHook:
    """Adds scales of an FP8 KV cache to `inputs` (`layers/attention/attention.py`, `layers/quantization/kv_cache.py`)."""
    import torch

    if not str(module.kv_cache_dtype).startswith("fp8"):
        raise ConfigError(
            f"vLLM's {name!r} has a KV cache in {module.kv_cache_dtype!r}, but fp8 was requested and a refit "
            "has scales for every layer. vLLM does not quantize this layer's cache; use another model or kv_cache_dtype=auto"
        )
    backend = module.attn_backend.get_name()
    if backend not in _SCALES_IN_MEMORY:
        raise ConfigError(
            f"the attention backend {backend} takes the scales of its FP8 KV cache as numbers, which CUDA graphs freeze; "
            f"choose one of {', '.join(_SCALES_IN_MEMORY)} (policy.generation.vllm_kwargs.attention_backend)"
        )
    scales = torch.ones(2, dtype=torch.float32, device=module._k_scale.device)
    for index, kind in enumerate(KINDS):
        inputs[f"{name}.{kind}_scale"] = scales[index : index + 1]
    return partial(_write_kv_scales, module, scales)


def _write_kv_scales(module: Any, scales: torch.Tensor) -> None:
    """Writes the scales to the device for kernels, and as numbers and to the host for eager code."""
    for kind, tensor, number in zip(KINDS, scales, scales.tolist(), strict=True):
        getattr(module, f"_{kind}_scale").copy_(tensor)
        setattr(module, f"_{kind}_scale_float", number)
        getattr(module, f"_{kind}_scale_cpu").fill_(number)


_SCALES_IN_MEMORY = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that read the scales from the device, or run without CUDA graphs."""
