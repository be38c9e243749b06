"""Runs Megatron-Core without a GPU, over Gloo. All patches for this are here; with CUDA this module patches nothing.

Megatron-Core (0.16.1, 0.19.2) requires CUDA in six ways:

1. Its modules call `torch.cuda.current_device()`, `synchronize()` and streams, and pass `device="cuda"`. They get a view of
   `torch` that maps "cuda" to "cpu"; `torch` itself is unchanged.
2. Recomputation restores the state of the CUDA generator. It gets the CPU generator.
3. It calls `tensor.cuda()` for tied embeddings across pipeline stages and for optimizer state. It becomes a no-op.
4. Experts sharded over etp gather parts of unequal size, which Gloo does not support. The parts are padded.
5. Its optimizers, when built, compare `tensor.type()` with "torch.cuda.FloatTensor". `cuda_type_names()` makes that true.
6. Inductor compiles its fused functions, which costs 2 s per start and needs a C++ compiler. They run uncompiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dagrl.attributes import setting
from dagrl.errors import ConfigError

_MODULES = (
    *("models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "pipeline_parallel.schedules", "distributed", "optimizer"),
    *("tensor_parallel", "transformer.moe.moe_layer", "transformer.moe.token_dispatcher", "transformer.moe.experts"),
)
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")


def adapt() -> None:
    """Prepares this process for Megatron-Core. Call it after `import torch` and before Megatron is imported."""
    if torch.cuda.is_available():
        import_engine()
        return
    _patch_megatron()
    view = _torch_view()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]


@cache
def _patch_megatron() -> None:
    with setting(torch, compile=lambda function: function):  # would import inductor where functions are defined
        for name in _MODULES:
            importlib.import_module(f"megatron.core.{name}")
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    _pass_split_sizes_as_numbers()
    _gather_unequal_parts()


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Makes `tensor.type()` return "torch.cuda.FloatTensor" for CPU tensors, as Megatron's optimizers require."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    with setting(torch.Tensor, type=type_name):
        yield


class _View(ModuleType):
    """A module that forwards undefined attributes to another module."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Stream:
    """A stream on which all work is already done."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.wait_stream = self.wait_event = self.synchronize = lambda *_: None

    def record_event(self, *args: object) -> _Stream:
        return self


def _torch_view() -> ModuleType:
    stream = _Stream()
    view, cuda = _View(torch), _View(torch.cuda)
    vars(cuda).update(
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *args, **kwargs: None,
        current_stream=lambda *args, **kwargs: stream,
        default_stream=lambda *args, **kwargs: stream,
        stream=lambda *args, **kwargs: contextlib.nullcontext(),
        Stream=_Stream,
    )
    vars(view).update({name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}, cuda=cuda)
    return view


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def _pass_split_sizes_as_numbers() -> None:
    """Converts split sizes to NumPy for the token dispatcher. Megatron does that only when copying from a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    original = moe_utils.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def _gather_unequal_parts() -> None:
    """Pads the unequal parts that etp-sharded experts gather, because Gloo needs equal sizes."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(tensor: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return gather(tensor, group, None, use_global_buffer)
        rows = [int(size) for size in sizes]
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, rows, strict=True)])

    def reduce_scatter_parts(tensor: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return reduce_scatter(tensor, group, None, use_global_buffer)
        whole = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole.split([int(size) for size in sizes])[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_parts, reduce_scatter_parts


def import_engine() -> None:
    """Imports Transformer Engine if it is installed, as Megatron does. Raises ConfigError if it cannot be imported."""
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return
    try:
        _keep_cudnn(Path(torch.__file__).parents[1] / "nvidia" / "cudnn")
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # it checks its installation
        raise ConfigError(
            f"Transformer Engine {version} is installed, but its import fails: {error}. Build it for this torch, "
            f"{torch.__version__}, or uninstall it"
        ) from error


def _keep_cudnn(folder: Path) -> None:
    """Loads the cuDNN of torch's wheels. Transformer Engine would load the system's first, beside which torch's fails."""
    for library in sorted((folder / "lib").glob("libcudnn*.so*")):
        ctypes.CDLL(str(library))
    if folder.is_dir():
        os.environ.setdefault("CUDNN_HOME", str(folder))
