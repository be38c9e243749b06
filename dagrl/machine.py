"""What this machine has, found without importing torch or Ray."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dagrl.config import ClusterConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEV_SHM = Path("/dev/shm")  # noqa: S108  # where Linux keeps shared memory, not a temporary file of ours


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use: those of `CUDA_VISIBLE_DEVICES`, or all that the driver shows."""
    return len(gpu_ids())


def gpu_ids() -> list[str]:
    """Of the same GPUs, the indices or UUIDs that `CUDA_VISIBLE_DEVICES` may name."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return visible_gpus(tuple(map(str, range(present))))[:present]


def visible_gpus(present: Sequence[str]) -> list[str]:
    """Of the GPUs that are `present`, by index, those that `CUDA_VISIBLE_DEVICES` lets a process use, in its order.

    As CUDA reads it: the list ends before the first index that there is not (`-1` hides all). An entry that is no index, a
    UUID, is returned as it stands.
    """
    entries = os.environ.get(VISIBLE)
    if entries is None:
        return list(present)
    found: list[str] = []
    for entry in map(str.strip, entries.split(",")):
        if entry.isdigit() and int(entry) < len(present):
            found.append(present[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            found.append(entry)
        else:
            break
    return found


def gpus_per_worker(config: ClusterConfig) -> float:
    """GPUs that each worker asks of Ray."""
    if config.gpus_per_worker is not None:
        return config.gpus_per_worker
    return 1.0 if (gpu_count() if config.num_gpus is None else config.num_gpus) else 0.0


def descendants_of(pid: int) -> list[int]:
    """Pids of what a process has started and is alive, and of what that has; none where there is no `/proc`."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += map(int, children.read_text().split())
    return found + [pid for child in found for pid in descendants_of(child)]


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of the distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
