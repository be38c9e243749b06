"""The CPU as a platform of verl, by its own plug-in interface: verl imports this file, as `verl_steps.ON_CPU` says.

verl registers its FSDP engine for CUDA and NPU. `VERL_ENGINE_DEVICE` chooses the same class here, with Gloo.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

# verl asks for a backend of the host's memory and one of the device's; on the CPU both are the same, which torch refuses.
_init_process_group = torch.distributed.init_process_group


def _init_with_one_backend(backend: str | None = None, **kwargs: Any) -> None:
    _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


setattr(torch.distributed, "init_process_group", _init_with_one_backend)  # noqa: B010  # it has another signature


def _always(value: Any) -> Callable[..., Any]:
    """Returns a method that returns `value`, whatever its arguments."""
    return lambda self, *args, **kwargs: value


class CpuDevice(ModuleType):
    """`torch.cpu` with the questions about memory that verl asks of an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    max_memory_allocated = memory_allocated = memory_reserved = max_memory_reserved = _always(0)
    mem_get_info = _always((1 << 30, 1 << 30))
    get_device_name = _always("CPU")
    empty_cache = reset_peak_memory_stats = ipc_collect = _always(None)

    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]  # verl has no types
    """What verl asks of a device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDevice("cpu_device")

    is_available = _always(True)
    current_device = _always("cpu")  # verl passes it to `Tensor.to`, where a number would be a GPU
    device_count = _always(1)
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _always(None)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("CPU")
    is_ipc_supported = _always(False)

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}
