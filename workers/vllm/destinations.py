"""Destinations of a refit in vLLM: the tensors it writes in place, and the hooks that run after the write.

Every parameter has one destination tensor in vLLM's fused layout of this rank. If vLLM computes with the loaded parameter
(dense and Triton-MoE models on GPUs; norms and embeddings everywhere), the destination is that live parameter, and CUDA
graphs stay valid. If vLLM converted it and dropped the original (oneDNN-packed linears and packed experts on CPUs, shuffled
experts on GPUs), the original is kept as destination. A hook then makes vLLM convert again, into the same memory if the
result is a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice, volume
from dagrl.workers.families.family import DerivedRule
from dagrl.workers.vllm.derived import RefitHook, derive
from dagrl.workers.vllm.loader import LoadedParameter
from dagrl.workers.vllm.quantization import check_form
from dagrl.workers.vllm.weights import local_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Destinations:
    """`tensors` by local name, written in any order. Then all `hooks` run in order."""

    tensors: Mapping[str, torch.Tensor]
    hooks: Sequence[RefitHook]


def find_destinations(
    model: torch.nn.Module,
    loaded: Mapping[str, LoadedParameter],
    slices: Sequence[WeightSlice],
    vllm_config: Any,
    rules: Sequence[DerivedRule] = (),
) -> Destinations:
    """Returns the destinations of `slices` in a loaded model. `rules` are its family's rules for derived tensors.

    Raises ConfigError if an update in place is not possible.
    """
    if vllm_config.quant_config is not None:
        check_form(vllm_config.quant_config)
    wanted = {piece.tensor for piece in slices} | {piece.scales.tensor for piece in slices if piece.scales is not None}
    named = {
        local_name(name): name for name, parameter in loaded.items() if parameter.tensor.dim()
    }  # scalars belong to the KV cache
    derived = derive(model, rules, vllm_config.model_config.dtype)
    wanted -= derived.inputs.keys()
    _check_names(wanted, named, loaded, model, {f"{rule.module}.{name}" for rule in rules for name in rule.tensors})
    live = dict(model.named_parameters(remove_duplicate=False))
    described = _described(slices)
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[str, torch.Tensor] = {}
    for name in sorted(wanted):
        parameter = loaded[named[name]]
        if not parameter.unchanged():
            raise ConfigError(
                f"vLLM rearranged {named[name]!r} in place after loading, which a refit cannot undo; choose a kernel that "
                "does not (VLLM_USE_DEEP_GEMM=0, another moe_backend)"
            )
        tensors[name] = parameter.tensor
        _check_filled(named[name], parameter.tensor, described[name], model)
        if not _same_memory(parameter.tensor, live.get(named[name])):
            kept[named[name]] = parameter.tensor
    hooks = (*_hooks(model, kept, wanted, vllm_config), *derived.hooks)
    return Destinations({**tensors, **derived.inputs}, hooks)


def _check_names(
    wanted: set[str],
    named: Mapping[str, str],
    loaded: Mapping[str, LoadedParameter],
    model: torch.nn.Module,
    derived: set[str],
) -> None:
    """Checks that slices and parameters name the same tensors. Aliases of one tensor (tied head, router) count once."""
    missing = sorted(wanted - named.keys())
    known = {loaded[named[name]].tensor.data_ptr() for name in wanted & named.keys()}
    others = {name for name in named.keys() - wanted if loaded[named[name]].tensor.data_ptr() not in known}
    unknown = sorted(others - derived - {"lm_head.weight"})  # wanted when untied; else see _tied_head
    if missing or unknown:
        raise ConfigError(
            f"{type(model).__name__} in this vLLM lacks tensors of its weight layout ({missing[:4]}) "
            f"or has others ({unknown[:4]}). Use a plain checkpoint of a known family, or extend workers/families"
        )


def _described(slices: Sequence[WeightSlice]) -> Mapping[str, int]:
    """Returns how many elements of each tensor the slices cover. Slices do not overlap."""
    found: dict[str, int] = defaultdict(int)
    for piece in slices:
        found[piece.tensor] += volume(piece.local)
        if piece.scales is not None:
            found[piece.scales.tensor] += volume(piece.scales.local)
    return found


def _check_filled(name: str, tensor: torch.Tensor, described: int, model: torch.nn.Module) -> None:
    """Raises ConfigError if a refit would leave elements unwritten, except padding rows of a vocabulary."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if described == tensor.numel():
        return
    padded = isinstance(model.get_submodule(name.rpartition(".")[0]), VocabParallelEmbedding)
    if not padded or described > tensor.numel() or described % tensor[0].numel():
        raise ConfigError(
            f"{name!r} has {tensor.numel()} elements in this vLLM, shape {tuple(tensor.shape)}, but its weight layout "
            f"covers {described}; vLLM has padded or changed it. Extend workers/families, or choose a kernel that does not"
        )


def _same_memory(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    return (
        second is not None
        and first.data_ptr() == second.data_ptr()
        and (first.shape, first.stride()) == (second.shape, second.stride())
    )


def _hooks(
    model: torch.nn.Module, kept: Mapping[str, torch.Tensor], wanted: set[str], vllm_config: Any
) -> Iterator[RefitHook]:
    if "lm_head.weight" not in wanted:
        yield from _tied_head(model)
    by_module: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
    for name, tensor in kept.items():
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(model.get_submodule(path), {})[attribute] = tensor
    for name, module in model.named_modules():
        # The CPU backend also keeps a packed copy next to the live parameter of the embedding and of a (tied) head.
        if module in by_module or hasattr(module, "cpu_linear"):
            yield RefitHook(f"repack {name}", _Repack(module, by_module.get(module, {}), vllm_config))


def _tied_head(model: torch.nn.Module) -> Iterator[RefitHook]:
    """Yields a hook for a tied head that has its own memory in vLLM, because the checkpoint stores a different one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    head, embedding = parameters.get("lm_head.weight"), parameters["model.embed_tokens.weight"]
    if head is not None and head.data_ptr() != embedding.data_ptr():
        yield RefitHook("copy the embedding to the tied lm_head", partial(_copy, embedding.data, head.data))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


class _Repack:
    """Makes vLLM process one layer's weights again from the destination tensors, as after loading."""

    def __init__(self, module: torch.nn.Module, kept: Mapping[str, torch.Tensor], vllm_config: Any) -> None:
        self._module, self._kept, self._vllm_config = module, kept, vllm_config

    def __call__(self) -> None:
        import torch
        from vllm.config import set_current_vllm_config

        module = self._module
        method: Any = module.quant_method
        packed = {name: getattr(module, name) for name in self._kept}
        for name, tensor in self._kept.items():
            # Packing experts may write to its input; packing linears only reads it.
            source = tensor.clone() if tensor.dim() > 2 else tensor
            setattr(module, name, torch.nn.Parameter(source, requires_grad=False))
        if getattr(method, "moe_kernel", None) is not None and not _on_gpu(module):
            method.moe_kernel = None  # the CPU kernels pack only on creation
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            method.process_weights_after_loading(module)
        for name, old in packed.items():
            _put_back(module, name, old)


def _on_gpu(module: torch.nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters(recurse=False))


def _put_back(module: torch.nn.Module, name: str, old: torch.nn.Parameter) -> None:
    """Copies a new packed tensor into the memory of the old one, where kernels and CUDA graphs point."""
    new = getattr(module, name)
    if new.shape == old.shape and new.stride() == old.stride():
        old.data.copy_(new.data)
        setattr(module, name, old)
