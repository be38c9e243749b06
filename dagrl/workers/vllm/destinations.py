"""Destinations of a refit in vLLM: the tensors it writes in place, and the hooks that run after the write.

The recording of vLLM's own loader says where each parameter lies. What remains here is what vLLM does after loading:

- What vLLM computes with as loaded (norms and embeddings; linears and Triton's experts on GPUs) is written in place.
- Where it converts a parameter and drops the original (oneDNN-packed linears and packed experts on CPUs, shuffled experts on
  GPUs), the original is kept as destination, and vLLM converts it again after each write.
- MLA's absorbed weights are computed from what a refit writes.

New values go into the old memory, where kernels and CUDA graphs point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import CheckpointError, ConfigError
from dagrl.refit.slices import WeightSlice
from dagrl.workers.vllm.loader import LoadedModel
from dagrl.workers.vllm.quantization import check_form

if TYPE_CHECKING:
    import torch

HEAD = "lm_head.weight"

ABSORBED = ("W_UV", "W_UK_T")  # attributes of MLA attention

RefitHook = Callable[[], object]


@dataclass(frozen=True)
class Destinations:
    """What a refit writes: `slices` of `tensors`, by local name, in any order. Then all `hooks` run in order."""

    slices: Sequence[WeightSlice]
    tensors: Mapping[str, torch.Tensor]
    hooks: Sequence[RefitHook]


def find_destinations(model: torch.nn.Module, loaded: LoadedModel, vllm_config: Any, *, tied: bool = False) -> Destinations:
    """Returns the destinations in a loaded model.

    `tied`: a refit sends the embedding alone, also if the checkpoint has a head of its own. Raises ConfigError if an update
    in place is not possible.
    """
    import torch

    from dagrl.refit.recording import Recorded, check_complete, named_tensors

    if vllm_config.quant_config is not None:
        check_form(vllm_config.quant_config)
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise ConfigError("vLLM's EPLB moves experts at run time, but a refit is planned once; set enable_eplb to false")
    recording, dtype, live = loaded.recording, vllm_config.model_config.dtype, named_tensors(model)
    check_complete(type(model).__name__, recording)
    recorded = Recorded(recording, {name: weight.tensor for name, weight in loaded.tensors.items()})
    slices = [weight for weight in recording.slices if not (tied and weight.name.endswith(HEAD))]
    names = dict.fromkeys(part.tensor for weight in slices for part in (weight, weight.scales) if part is not None)
    written = [recording.arranged[name].tensor if name in recording.arranged else name for name in names]
    written += [computation.parameter for computation in recording.computations]
    originals = defaultdict[torch.nn.Module, dict[str, torch.Tensor]](dict)
    for parameter in dict.fromkeys(written):
        if parameter not in loaded.tensors:  # the input of a computation
            continue
        original = loaded.tensors[parameter]
        if original.sample.isnan().any():
            raise CheckpointError(
                f"policy.model_name: the checkpoint's weights in {parameter!r} have NaN; download or convert the checkpoint "
                "again, or choose another"
            )
        if not original.unchanged():
            raise ConfigError(
                f"vLLM rearranged {parameter!r} in place after loading, which a refit cannot undo; choose a kernel that "
                "does not (VLLM_USE_DEEP_GEMM=0, another moe_backend)"
            )
        if not _same_memory(original.tensor, live.get(parameter)):
            path, _, attribute = parameter.rpartition(".")
            originals[model.get_submodule(path)][attribute] = original.tensor
    tensors = {name: recorded.tensors[name] for name in names}
    hooks: list[RefitHook] = [recorded.compute] if recording.computations else []
    head, embedding = live.get(HEAD), live.get("model.embed_tokens.weight")
    if tied and head is not None and embedding is not None and head.data_ptr() != embedding.data_ptr():
        hooks.append(partial(head.copy_, embedding))  # the checkpoint stores another head
    # The CPU backend also keeps a packed copy next to the live parameter of the embedding and of a (tied) head.
    packed = [module for module in model.modules() if module in originals or hasattr(module, "cpu_linear")]
    hooks += [partial(_repack, module, originals[module], vllm_config) for module in packed]
    hooks += absorbed(model, dtype)
    return Destinations(slices, tensors, hooks)


def _same_memory(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    facts = ("data_ptr", "size", "stride")
    return second is not None and all(getattr(first, fact)() == getattr(second, fact)() for fact in facts)


def _repack(module: torch.nn.Module, originals: Mapping[str, torch.Tensor], vllm_config: Any) -> None:
    """Makes vLLM process one layer's weights again from the destination tensors, as after loading."""
    import torch
    from vllm.config import set_current_vllm_config

    method: Any = module.quant_method
    packed = {name: getattr(module, name) for name in originals}
    for name, tensor in originals.items():
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
        if (new.shape, new.stride()) == (old.shape, old.stride()):
            old.data.copy_(new.data)
            setattr(module, name, old)


def absorbed(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[RefitHook]:
    """Yields hooks for MLA's `W_UV` and `W_UK_T`, computed from `kv_b_proj` (`layers/attention/mla_attention.py`)."""
    from vllm.model_executor.layers.attention import MLAAttention

    for name, module in [named for named in model.named_modules() if isinstance(named[1], MLAAttention)]:
        projections = {attribute: getattr(module, attribute) for attribute in ABSORBED if hasattr(module, attribute)}
        if projections:  # backends with additional tensors refill those in place
            yield partial(_absorb, module, projections, dtype)
        elif not hasattr(module, "W_K"):
            raise ConfigError(
                f"vLLM's {name!r} has none of {', '.join(ABSORBED)} after loading. This attention backend keeps its "
                "projections elsewhere, where a refit cannot update them; choose another attention backend "
                "(policy.generation.vllm_kwargs.attention_backend)"
            )


def _absorb(module: Any, projections: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    import torch

    with torch.no_grad():
        module.process_weights_after_loading(dtype)
        for name, old in projections.items():
            new = getattr(module, name)
            if new is not old:
                old.copy_(new)
                setattr(module, name, old)
