"""What a measurement ran on: GPUs, how they are linked, driver, processor, and the versions that matter.

python -m bench.gpu.environment            print it
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.report import hardware

PACKAGES = (
    "dagrl", "ray", "torch", "triton", "vllm", "megatron-core", "transformer-engine", "transformers", "cupy-cuda13x",
    "cupy-cuda12x", "numpy", "safetensors",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """`topology` is the matrix of `nvidia-smi topo -m`; `variables` those of NCCL, CUDA, vLLM and Ray that are set."""

    gpus: tuple[str, ...]
    memory_mib: tuple[int, ...]
    driver: str
    topology: str
    processor: str
    kernel: str
    versions: dict[str, str]
    variables: dict[str, str]
    commit: str

    @property
    def slug(self) -> str:
        """A directory's name: `4x-nvidia-h200`."""
        if not self.gpus:
            return "no-gpu"
        return f"{len(self.gpus)}x-" + re.sub(r"[^a-z0-9]+", "-", self.gpus[0].lower()).strip("-")

    def text(self) -> str:
        """For people."""
        lines = [f"{len(self.gpus)} GPUs: {', '.join(sorted(set(self.gpus))) or 'none'}, driver {self.driver or 'none'}"]
        lines += [self.processor, f"kernel {self.kernel}", f"commit {self.commit}"]
        lines += [f"{name} {found}" for name, found in self.versions.items()]
        return "\n".join(lines) + (f"\n\n{self.topology}" if self.topology else "") + "\n"


def environment() -> Environment:
    """Of this machine."""
    rows = [line.split(", ") for line in _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")]
    return Environment(
        gpus=tuple(row[0] for row in rows),
        memory_mib=tuple(int(row[1]) for row in rows),
        driver=rows[0][2] if rows else "",
        topology=re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(_output("nvidia-smi", "topo", "-m"))),
        processor=hardware(),
        kernel=platform.release(),
        versions=_versions(),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        commit="".join(_output("git", "describe", "--always", "--dirty", "--abbrev=12")),
    )


_QUERY = "name,memory.total,driver_version"
_VARIABLES = ("NCCL_", "CUDA_VISIBLE", "CUDA_DEVICE_MAX", "VLLM_", "RAY_", "TORCH_SYMM", "NVSHMEM_")


def _output(*command: str) -> list[str]:
    """Lines of a command's output; none where it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent)  # noqa: S603
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    import torch

    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


if __name__ == "__main__":
    here = environment()
    sys.stdout.write(json.dumps(asdict(here), indent=1) + "\n" if "--json" in sys.argv else here.text())
