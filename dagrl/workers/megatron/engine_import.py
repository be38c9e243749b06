"""The import of Transformer Engine, before that of Megatron-Core, which imports it wherever it is installed."""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path

from dagrl.config.worker_checks import engine_version
from dagrl.errors import ConfigError


def import_engine() -> None:
    """Imports Transformer Engine if it is installed. Raises ConfigError if it cannot be imported."""
    import torch

    if engine_version() is None:
        return
    try:
        _keep_cudnn(Path(torch.__file__).parents[1] / "nvidia" / "cudnn")
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # it checks its installation
        raise ConfigError(
            f"Transformer Engine {engine_version()} is installed, but its import fails: {error}. Build it for this torch, "
            f"{torch.__version__}, or uninstall it"
        ) from error


def _keep_cudnn(folder: Path) -> None:
    """Loads the cuDNN of torch's wheels. Transformer Engine would load the system's first, beside which torch's fails."""
    for library in sorted((folder / "lib").glob("libcudnn*.so*")):
        ctypes.CDLL(str(library))
    if folder.is_dir():
        os.environ.setdefault("CUDNN_HOME", str(folder))
