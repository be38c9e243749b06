"""Named ranges for profilers: NVTX ranges for Nsight Systems, and records of `torch.profiler`.

    enable_ranges()                       # in the process to profile; `logger.nvtx_enabled` calls it in every worker
    with annotate("train_step #12"):
        ...

    nsys profile --trace=cuda,nvtx --trace-fork-before-exec=true dagrl train CONFIG logger.nvtx_enabled=true

Before `enable_ranges` is called, every range is one shared empty context. NVTX needs CUDA; without it only the profiler's
records are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Range = AbstractContextManager[object]

_NOTHING: Range = nullcontext()
_open: Callable[[str], Range] | None = None


def enable_ranges(*_: object, opens: Callable[[str], Range] | None = None) -> None:
    """Enables ranges in this process; `opens` makes them, otherwise they are the profilers'."""
    global _open
    import torch

    _open = opens or (_nvtx_range if torch.cuda.is_available() else torch.profiler.record_function)


def disable_ranges() -> None:
    """Disables ranges in this process."""
    global _open
    _open = None


def ranges_enabled() -> bool:
    """Whether ranges are enabled, so that making up their names is worth the time."""
    return _open is not None


def annotate(name: str) -> Range:
    """Returns a context manager: a range called `name` on the calling thread."""
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
