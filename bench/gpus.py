"""The GPUs that a process may use, as `nvidia-smi` tells them: without torch, so that nothing is started on them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from dagrl.machine import visible_gpus

_QUERY = "uuid,name,memory.total,driver_version"


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB (0: it has none of its own, and shares the host's)."""

    uuid: str
    name: str
    memory_mib: int
    driver: str


def gpus() -> list[Gpu]:
    """Those that `CUDA_VISIBLE_DEVICES` lets be seen; none without `nvidia-smi`, or where it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)  # noqa: S603
    return visible(done.stdout) if done.returncode == 0 else []


def visible(table: str) -> list[Gpu]:
    """Of the lines that `nvidia-smi` printed, the GPUs that a process may use."""
    every = []
    for uuid, name, memory, driver in (line.split(", ") for line in table.strip().splitlines()):
        every.append(Gpu(uuid, name, int(memory) if memory.isdigit() else 0, driver))
    chosen = visible_gpus([gpu.uuid for gpu in every])
    return [gpu for uuid in chosen for gpu in every if gpu.uuid.startswith(uuid)]
