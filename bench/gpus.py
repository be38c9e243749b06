"""Lists the visible GPUs with `nvidia-smi`, without importing torch and creating a CUDA context."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from dagrl.machine import visible_gpus

_QUERY = "uuid,name,memory.total,driver_version"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `memory_mib` is 0 if the GPU shares the host's memory."""

    uuid: str
    name: str
    memory_mib: int
    driver: str


def gpus() -> list[Gpu]:
    """Returns the GPUs that `CUDA_VISIBLE_DEVICES` allows; an empty list if `nvidia-smi` is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)  # noqa: S603
    return visible(done.stdout) if done.returncode == 0 else []


def visible(table: str) -> list[Gpu]:
    """Returns the visible GPUs from `nvidia-smi`'s output."""
    every = []
    for uuid, name, memory, driver in (line.split(", ") for line in table.strip().splitlines()):
        every.append(Gpu(uuid, name, int(memory) if memory.isdigit() else 0, driver))
    chosen = visible_gpus([gpu.uuid for gpu in every])
    return [gpu for uuid in chosen for gpu in every if gpu.uuid.startswith(uuid)]
