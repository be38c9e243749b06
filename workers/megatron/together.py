"""What all workers of a train group do together with files: when one fails, all raise, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dagrl.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = TypeVar("Result")


def together(group: ProcessGroup | None, action: Callable[..., Result], *args: Any) -> Result:
    """Run `action` on every rank; when it fails on one, raise CheckpointError with its message on all.

    A collective in `group`; without one this process is alone, and its error is raised as it is.
    """
    if group is None:
        return action(*args)
    error: Exception | None = None
    try:
        result = action(*args)
    except Exception as raised:
        error = raised
    failed = [message for message in gather_objects(group, None if error is None else str(error)) if message is not None]
    if failed:
        raise CheckpointError(failed[0]) from error
    return result


def gather_objects(group: ProcessGroup, value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group)
    return gathered
