"""Named ranges for profilers: NVTX ranges for Nsight Systems, and records of `torch.profiler`.

    enable_ranges()                       # in the process to profile; `logger.nvtx_enabled` calls it in every worker
    with annotate("train_step #12"):
        ...

    nsys profile --trace=cuda,nvtx --trace-fork-before-exec=true dagrl train CONFIG logger.nvtx_enabled=true

Before `enable_ranges` is called, every range is one shared empty context. NVTX needs CUDA; without it only the profiler's
records are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING: AbstractContextManager[object] = nullcontext()
_enabled = False


def enable_ranges(*_: object) -> None:
    """Enables ranges in this process."""
    global _enabled
    _enabled = True


def ranges_enabled() -> bool:
    """Returns whether ranges are enabled, so that making up their names is worth the time."""
    return _enabled


def annotate(name: str) -> AbstractContextManager[object]:
    """Returns a context manager: a range called `name` on the calling thread."""
    return _range(name) if _enabled else _NOTHING


@contextmanager
def _range(name: str) -> Iterator[None]:
    import torch

    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else _NOTHING
    with nvtx, torch.profiler.record_function(name):
        yield
