"""Aborts torch process groups and resets their name counter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

ABORT_S = 2.5  # time for NCCL to end aborted communicators
_ABORT_TAG = 1 << 20  # no message is sent with this tag


def break_groups(groups: Iterable[ProcessGroup], more: Iterable[Callable[[], None]] = ()) -> bool:
    """Aborts all pending operations in `groups`, here and at peers. May be called from any thread.

    The groups cannot be used afterwards. NCCL communicators are aborted concurrently, together with the calls in `more`:
    NCCL ends a communicator only when the kernels on its device are done, and these may wait for another communicator, and
    when no CUDA graph refers to it. Pending operations are released at once. Returns whether all communicators ended within
    `ABORT_S`; if not, the process has to end.
    """
    aborts = list(more)
    for group in groups:
        if group.name() == "nccl":
            aborts.append(group.abort)
        else:
            break_gloo_group(group)
    threads = [threading.Thread(target=_abort, args=(abort,), daemon=True) for abort in aborts]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    left = sum(thread.is_alive() for thread in threads)
    if left:
        logger.warning(
            "%d NCCL communicators are still alive %g s after they were aborted; this process must end", left, ABORT_S
        )
    return not left


def _abort(abort: Callable[[], None]) -> None:
    try:
        abort()
    except RuntimeError as error:
        logger.warning("a communicator could not be aborted: %s", error)


def break_gloo_group(group: ProcessGroup) -> None:
    """Aborts all pending operations in a Gloo group, here and at its peers. May be called from any thread.

    The group cannot be used afterwards. Gloo has no abort, but an operation that misses its deadline closes every connection
    of its context. So this posts a receive with a deadline of one millisecond to each peer; the first on an open connection
    closes them all.
    """
    import torch

    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            logger.debug("connection to rank %d of a group of %d: %s", peer, group.size(), error)


def reset_group_names() -> None:
    """Resets the counter that names process groups. Call it when no group is left.

    A failed join still counts. Without a reset the next group's name differs from that of its peers, and they never meet.
    """
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = 0
