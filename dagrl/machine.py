"""What this machine has, found without importing torch or Ray."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEV_SHM = Path("/dev/shm")  # noqa: S108  # Linux's shared memory, not a temporary file


def cpu_count() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_count() -> int:
    """Number of NVIDIA GPUs that this process may use: those of `CUDA_VISIBLE_DEVICES`, or all that the driver shows."""
    return len(gpu_ids())


def gpu_ids() -> list[str]:
    """The indices or UUIDs of these GPUs, as `CUDA_VISIBLE_DEVICES` names them."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return visible_gpus(tuple(map(str, range(present))))[:present]


def visible_gpus(present: Sequence[str]) -> list[str]:
    """Returns those of the GPUs in `present` (by index) that `CUDA_VISIBLE_DEVICES` lets a process use, in its order.

    Reads the variable as CUDA does: the list ends at the first invalid index (`-1` hides all). An entry that is a UUID is
    returned unchanged.
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


def descendants_of(pid: int) -> list[int]:
    """Returns the pids of all living descendants of a process; none where there is no `/proc`."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += map(int, children.read_text().split())
    return found + [pid for child in found for pid in descendants_of(child)]


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
