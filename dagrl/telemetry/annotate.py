"""Named ranges for profilers: what a process is doing, as NVTX ranges for Nsight Systems and as records of `torch.profiler`.

    enable_ranges()                       # in the process that is to be seen; `logger.nvtx_enabled` does it in every worker
    with annotate("train_step #12"):
        ...

    nsys profile --trace=cuda,nvtx --trace-fork-before-exec=true dagrl train CONFIG logger.nvtx_enabled=true

Until `enable_ranges` is called a range is one shared empty context. NVTX needs CUDA; without it only the records are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Range = AbstractContextManager[object]

_NOTHING: Range = nullcontext()
_open: Callable[[str], Range] | None = None


def enable_ranges(*_: object) -> None:
    """Make ranges in this process from now on."""
    global _open
    import torch

    _open = _nvtx_range if torch.cuda.is_available() else torch.profiler.record_function


def disable_ranges() -> None:
    """Make no more ranges in this process."""
    global _open
    _open = None


def ranges_enabled() -> bool:
    """Whether names of ranges are worth making up."""
    return _open is not None


def annotate(name: str) -> Range:
    """A range of this name on the calling thread, for the time of a `with` block."""
    return _NOTHING if _open is None else _open(name)


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    import torch

    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
