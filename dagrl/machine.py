"""What this machine has, found without importing torch or Ray."""

from __future__ import annotations

import os
from pathlib import Path

from dagrl.config import ClusterConfig


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use: those of `CUDA_VISIBLE_DEVICES`, or all that the driver shows."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in Path("/dev").glob("nvidia[0-9]*")])
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))


def gpus_per_worker(config: ClusterConfig) -> float:
    """GPUs that each worker asks of Ray."""
    if config.gpus_per_worker is not None:
        return config.gpus_per_worker
    return 1.0 if (gpu_count() if config.num_gpus is None else config.num_gpus) else 0.0
