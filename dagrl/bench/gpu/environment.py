"""Describes the host of a benchmark: GPUs, links, driver, processor and package versions."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dagrl.bench.report import commit, hardware, output_of, versions
from dagrl.machine import gpus


@dataclass(frozen=True)
class Environment:
    """The visible GPUs and their host. `topology` is the matrix of `nvidia-smi topo -m`, for the whole host. `variables` are
    the set variables of NCCL, CUDA, vLLM and Ray. `torch_gpus` is the number of GPUs that torch sees."""

    gpus: tuple[str, ...]
    memory_mib: tuple[int, ...]
    driver: str
    topology: str
    processor: str
    versions: dict[str, str]
    variables: dict[str, str]
    commit: str
    torch_gpus: int

    @property
    def slug(self) -> str:
        """The name of the host's results directory: `4x-nvidia-h200`."""
        if not self.gpus:
            return "no-gpu"
        return f"{len(self.gpus)}x-" + re.sub(r"[^a-z0-9]+", "-", self.gpus[0].lower()).strip("-")

    def text(self) -> str:
        """Returns the description as text."""
        lines = [f"{len(self.gpus)} GPUs: {', '.join(sorted(set(self.gpus))) or 'none'}, driver {self.driver or 'none'}"]
        lines += [self.processor, f"commit {self.commit}"]
        lines += [f"{memory} MiB of GPU memory" for memory in sorted(set(self.memory_mib))]
        lines += [f"{name} {found}" for name, found in self.versions.items()]
        lines += [f"{name}={value}" for name, value in self.variables.items()]
        return "\n".join(lines) + (f"\n\n{self.topology}" if self.topology else "") + "\n"


def environment() -> Environment:
    """Returns this machine's environment."""
    import torch

    cards, seen = gpus(), torch.cuda.device_count()
    nccl: tuple[int, ...] = torch.cuda.nccl.version() if seen else ()  # type: ignore[no-untyped-call]
    cuda = {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl))} if seen else {}
    return Environment(
        gpus=tuple(gpu.name for gpu in cards),
        memory_mib=tuple(gpu.memory_mib for gpu in cards),
        driver=cards[0].driver if cards else "",
        topology=re.sub(r"\x1b\[[0-9;]*m", "", output_of("nvidia-smi", "topo", "-m")),
        processor=hardware(),
        versions=versions() | cuda,
        variables={name: value for name, value in sorted(os.environ.items()) if _KEPT.match(name)},
        commit=commit(),
        torch_gpus=seen,
    )


_KEPT = re.compile(r"(NCCL|CUDA_VISIBLE|CUDA_DEVICE_MAX|VLLM|RAY|TORCH_SYMM|NVSHMEM)_(?!.*(TOKEN|KEY|SECRET|PASSWORD))")
"""Variables to record: those that affect a measurement, never secrets."""
