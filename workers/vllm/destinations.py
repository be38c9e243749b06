"""Destinations of a refit in vLLM: the tensors it writes in place, and the hooks that run after the write.

Every parameter has one destination tensor in vLLM's fused layout of this rank. If vLLM computes with the loaded parameter
(dense and Triton-MoE models on GPUs; norms and embeddings everywhere), the destination is that live parameter, and CUDA
graphs stay valid. If vLLM converted it and dropped the original (oneDNN-packed linears and packed experts on CPUs, shuffled
experts on GPUs), the original is kept as destination. A hook then makes vLLM convert again, into the same memory if the
result is a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError
from dagrl.refit.recorded import Recorded, check_complete, named_tensors
from dagrl.refit.slices import WeightSlice
from dagrl.refit.strided import Strided
from dagrl.workers.vllm.derived import RefitHook, derive
from dagrl.workers.vllm.loader import LoadedModel
from dagrl.workers.vllm.quantization import check_form

if TYPE_CHECKING:
    import torch


HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Destinations:
    """What a refit writes: `slices` of `tensors`, by local name, in any order. Then all `hooks` run in order."""

    slices: Sequence[WeightSlice]
    tensors: Mapping[str, torch.Tensor]
    hooks: Sequence[RefitHook]


def find_destinations(
    model: torch.nn.Module, loaded: LoadedModel, vllm_config: Any, *, tied: bool = False, scaled: Sequence[str] = ()
) -> Destinations:
    """Returns the destinations in a loaded model.

    `tied`: a refit sends the embedding alone, also if the checkpoint has a head of its own. `scaled`: attention modules with
    an FP8 KV cache whose scales a refit sends. Raises ConfigError if an update in place is not possible.
    """
    if vllm_config.quant_config is not None:
        check_form(vllm_config.quant_config)
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise ConfigError("vLLM's EPLB moves experts at run time, but a refit is planned once; set enable_eplb to false")
    recording = loaded.recording
    check_complete(type(model).__name__, recording)
    slices = [one for one in recording.slices if not (tied and one.name.endswith(HEAD))]
    recorded = Recorded(recording, {name: one.tensor for name, one in loaded.tensors.items()})
    device = next(model.parameters()).device
    whole = {name: Strided.whole(shape).empty(kind, device) for name, (shape, kind) in recording.unmapped.items()}
    live = named_tensors(model)
    written = [name for one in slices for name in (one.tensor, *([one.scales.tensor] if one.scales else []))]
    tensors = {name: recorded.tensors[name] for name in written}
    kept = dict[str, "torch.Tensor"]()
    for name in tensors:
        parameter = recording.arranged[name].tensor if name in recording.arranged else name
        if parameter not in loaded.tensors:  # the input of a computation
            continue
        if not loaded.tensors[parameter].unchanged():
            raise ConfigError(
                f"vLLM rearranged {parameter!r} in place after loading, which a refit cannot undo; choose a kernel that "
                "does not (VLLM_USE_DEEP_GEMM=0, another moe_backend)"
            )
        if not _same_memory(recorded.tensors[parameter], live.get(parameter)):
            kept[parameter] = recorded.tensors[parameter]
    for name in recording.unwritten if whole else ():
        if not _same_memory(loaded.tensors[name].tensor, live.get(name)):
            raise ConfigError(
                f"refit.unmapped is load, but vLLM converted {name!r} after loading and its loader can no longer write it; "
                "choose a kernel that computes with the loaded parameter"
            )
    sent = [_whole(name, tensor, vllm_config.model_config.dtype) for name, tensor in whole.items()]
    tensors |= {one.tensor: whole[one.name] for one in sent}
    derived, last = derive(model, scaled, vllm_config.model_config.dtype)
    first: list[RefitHook] = [partial(_load, model, whole)] if whole else []
    if recording.computations:
        first.append(recorded.compute)
    hooks = (*first, *_hooks(model, kept, tied, vllm_config), *last)
    return Destinations(slices + sent, tensors | derived, hooks)


def _whole(name: str, tensor: torch.Tensor, default: torch.dtype) -> WeightSlice:
    box = tuple((0, size) for size in tensor.shape)
    dtype = "" if tensor.dtype == default else str(tensor.dtype).removeprefix("torch.")
    return WeightSlice(name, box, f"load_weights({name})", box, dtype)


def _load(model: torch.nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Gives whole parameters to vLLM's own loader of the model."""
    import torch

    with torch.no_grad():
        model.load_weights(iter(whole.items()))  # type: ignore[operator]


def _same_memory(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    facts = ("data_ptr", "size", "stride")
    return second is not None and all(getattr(first, fact)() == getattr(second, fact)() for fact in facts)


def _hooks(model: torch.nn.Module, kept: Mapping[str, torch.Tensor], tied: bool, vllm_config: Any) -> Iterator[RefitHook]:
    if tied:
        yield from _tied_head(model)
    by_module: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
    for name, tensor in kept.items():
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(model.get_submodule(path), {})[attribute] = tensor
    for module in model.modules():
        # The CPU backend also keeps a packed copy next to the live parameter of the embedding and of a (tied) head.
        if module in by_module or hasattr(module, "cpu_linear"):
            yield partial(_repack, module, by_module.get(module, {}), vllm_config)


def _tied_head(model: torch.nn.Module) -> Iterator[RefitHook]:
    """Yields a hook for a tied head that has its own memory in vLLM, because the checkpoint stores a different one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    head, embedding = parameters.get(HEAD), parameters.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and head.data_ptr() != embedding.data_ptr():
        yield partial(head.data.copy_, embedding.data)


def _repack(module: torch.nn.Module, kept: Mapping[str, torch.Tensor], vllm_config: Any) -> None:
    """Makes vLLM process one layer's weights again from the destination tensors, as after loading."""
    import torch
    from vllm.config import set_current_vllm_config

    method: Any = module.quant_method
    packed = {name: getattr(module, name) for name in kept}
    for name, tensor in kept.items():
        # Packing experts may write to its input; packing linears only reads it.
        source = tensor.clone() if tensor.dim() > 2 else tensor
        setattr(module, name, torch.nn.Parameter(source, requires_grad=False))
    on_gpu = any(parameter.is_cuda for parameter in module.parameters(recurse=False))
    if getattr(method, "moe_kernel", None) is not None and not on_gpu:
        method.moe_kernel = None  # the CPU kernels pack only on creation
    with torch.no_grad(), set_current_vllm_config(vllm_config):
        method.process_weights_after_loading(module)
    for name, old in packed.items():
        new = getattr(module, name)
        if (new.shape, new.stride()) == (old.shape, old.stride()):  # kernels and CUDA graphs point to the old memory
            old.data.copy_(new.data)
            setattr(module, name, old)
