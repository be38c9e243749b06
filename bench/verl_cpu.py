"""The CPU as a platform of verl, by its own plug-in interface: verl imports this file, as `verl_steps.ON_CPU` says.

verl registers its FSDP engine for CUDA and NPU. `VERL_ENGINE_DEVICE` chooses the same class here, with Gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class CpuDevice(ModuleType):
    """`torch.cpu` with the questions about memory that verl asks of an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def max_memory_allocated(self) -> int:
        return 0

    memory_allocated = memory_reserved = max_memory_reserved = max_memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def get_device_name(self) -> str:
        return "CPU"

    def empty_cache(self) -> None:
        pass

    reset_peak_memory_stats = ipc_collect = empty_cache

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]  # verl has no types
    """What verl asks of a device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDevice("cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # verl passes it to `Tensor.to`, where a number would be a GPU
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
