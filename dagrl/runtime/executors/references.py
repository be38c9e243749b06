"""References that `ray.get` takes and that are no objects of Ray's store: their values come from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.experimental.compiled_dag_ref import CompiledDAGRef


class ValueRef(CompiledDAGRef):  # type: ignore[misc]  # Ray has no types
    """A reference for `ray.get`, which asks references of this kind for their value.

    `read(timeout_s)` returns the value, or raises Ray's GetTimeoutError; None waits. `ray.wait` does not take such a
    reference, and it cannot be passed to another call.
    """

    def __init__(self, read: Callable[[float | None], Any]) -> None:
        self._read = read

    def get(self, timeout: float | None = None) -> Any:
        return self._read(timeout)

    def __str__(self) -> str:
        return f"ValueRef({self._read})"

    def __del__(self) -> None:
        """Nothing to release; Ray's own class drops a buffered result."""
