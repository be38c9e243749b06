"""In-place weight updates: the tensors that a refit writes, and the hooks that must run after the write.

For every parameter there is one destination tensor in vLLM's fused layout of this rank. Where vLLM computes with the
parameter as it was loaded (dense and Triton-MoE models on GPUs, norms and embeddings everywhere) that is the live parameter,
which CUDA graphs go on pointing at, and nothing is left to do. Where vLLM made something else of it and dropped the original
(oneDNN-packed linears and packed experts on CPUs, shuffled experts on GPUs) the original is kept as the destination, and a
hook has vLLM make that something again, in the same memory where it is a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice, volume
from workers.families.model import Derived
from workers.vllm.derived import Hook, derive
from workers.vllm.loader import LoadedParameter
from workers.vllm.quantization import check_form
from workers.vllm.weights import local_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Destinations:
    """`tensors` by local name, to be written in any order; then all `hooks`, in order."""

    tensors: Mapping[str, torch.Tensor]
    hooks: Sequence[Hook]


def find_destinations(
    model: torch.nn.Module,
    loaded: Mapping[str, LoadedParameter],
    slices: Sequence[WeightSlice],
    vllm_config: Any,
    rules: Sequence[Derived] = (),
) -> Destinations:
    """The destinations of `slices` in a loaded model, whose family has `rules` for derived tensors.

    Raises ConfigError where an update in place is not possible.
    """
    if vllm_config.quant_config is not None:
        check_form(vllm_config.quant_config)
    wanted = {piece.tensor for piece in slices} | {piece.scales.tensor for piece in slices if piece.scales is not None}
    named = {local_name(name): name for name, parameter in loaded.items() if parameter.tensor.dim()}  # not of the KV cache
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
                f"vLLM rearranged {named[name]!r} in its own memory after loading, which a refit could not undo; choose a "
                "kernel that does not (VLLM_USE_DEEP_GEMM=0, another moe_backend)"
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
    """Slices and parameters name the same tensors; second names of one memory (a tied head, a router) are no others."""
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
    """How many elements of each tensor slices name; no two of them overlap."""
    found: dict[str, int] = defaultdict(int)
    for piece in slices:
        found[piece.tensor] += volume(piece.local)
        if piece.scales is not None:
            found[piece.scales.tensor] += volume(piece.scales.local)
    return found


def _check_filled(name: str, tensor: torch.Tensor, described: int, model: torch.nn.Module) -> None:
    """Raise ConfigError where a refit would leave elements as they were; padding rows of a vocabulary are nobody's."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if described == tensor.numel():
        return
    padded = isinstance(model.get_submodule(name.rpartition(".")[0]), VocabParallelEmbedding)
    if not padded or described > tensor.numel() or described % tensor[0].numel():
        raise ConfigError(
            f"{name!r} has {tensor.numel()} elements in this vLLM, shape {tuple(tensor.shape)}, and its weight layout names "
            f"{described}; vLLM has padded or changed it. Extend workers/families, or choose a kernel that does not"
        )


def _same_memory(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    return (
        second is not None
        and first.data_ptr() == second.data_ptr()
        and (first.shape, first.stride()) == (second.shape, second.stride())
    )


def _hooks(model: torch.nn.Module, kept: Mapping[str, torch.Tensor], wanted: set[str], vllm_config: Any) -> Iterator[Hook]:
    if "lm_head.weight" not in wanted:
        yield from _tied_head(model)
    by_module: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
    for name, tensor in kept.items():
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(model.get_submodule(path), {})[attribute] = tensor
    for name, module in model.named_modules():
        # The CPU backend's packed copy stands beside live parameters too: that of the embedding, and of a (tied) head.
        if module in by_module or hasattr(module, "cpu_linear"):
            yield Hook(f"repack {name}", _Repack(module, by_module.get(module, {}), vllm_config))


def _tied_head(model: torch.nn.Module) -> Iterator[Hook]:
    """A head that the configuration ties, but that vLLM gave memory of its own (the checkpoint brought a different one)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    head, embedding = parameters.get("lm_head.weight"), parameters["model.embed_tokens.weight"]
    if head is not None and head.data_ptr() != embedding.data_ptr():
        yield Hook("copy the embedding to the tied lm_head", partial(_copy, embedding.data, head.data))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


class _Repack:
    """Have vLLM process one layer's weights again, from the destination tensors, as it did after loading."""

    def __init__(self, module: torch.nn.Module, kept: Mapping[str, torch.Tensor], vllm_config: Any) -> None:
        self._module, self._kept, self._vllm_config = module, kept, vllm_config

    def __call__(self) -> None:
        import torch
        from vllm.config import set_current_vllm_config

        module = self._module
        method: Any = module.quant_method
        packed = {name: getattr(module, name) for name in self._kept}
        for name, tensor in self._kept.items():
            # Experts are packed and padded in steps that may write into what they are given; linears only read it.
            source = tensor.clone() if tensor.dim() > 2 else tensor
            setattr(module, name, torch.nn.Parameter(source, requires_grad=False))
        if getattr(method, "moe_kernel", None) is not None and not _on_gpu(module):
            method.moe_kernel = None  # the CPU kernels pack only when they are made anew
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            method.process_weights_after_loading(module)
        for name, old in packed.items():
            _put_back(module, name, old)


def _on_gpu(module: torch.nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters(recurse=False))


def _put_back(module: torch.nn.Module, name: str, old: torch.nn.Parameter) -> None:
    """Move a new packed tensor into the memory of the old one, at which kernels and CUDA graphs point."""
    new = getattr(module, name)
    if new.shape == old.shape and new.stride() == old.stride():
        old.data.copy_(new.data)
        setattr(module, name, old)
