"""What torch's process groups do not offer: an end to what waits in any of them, and names that begin anew."""

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

ABORT_S = 2.5  # for NCCL to end the communicators that were aborted
_ABORT_TAG = 1 << 20  # nobody sends with it


def break_groups(groups: Iterable[ProcessGroup], more: Iterable[Callable[[], None]] = ()) -> bool:
    """From any thread: end what waits in any of `groups`, here and at peers; they are of no use any more.

    NCCL's are aborted all at once, and with them what else there is to abort (`more`): it ends a communicator only when the
    kernels on the device are done, which may wait in another one, and when no CUDA graph refers to it. What waits is freed
    at once. Returns whether all have ended within `ABORT_S`; if not, the process has to.
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
        logger.warning("%d NCCL communicators have not ended %g s after they were aborted; this process must", left, ABORT_S)
    return not left


def _abort(abort: Callable[[], None]) -> None:
    try:
        abort()
    except RuntimeError as error:
        logger.warning("a communicator did not end when it was aborted: %s", error)


def break_gloo_group(group: ProcessGroup) -> None:
    """End what waits in a Gloo group, here and at its peers, from any thread; the group is of no use any more.

    Gloo has no abort of its own, but an operation that passes its deadline closes every connection of its context. So one
    is posted to each peer with a deadline of a millisecond: the first whose connection still stands breaks them all.
    """
    import torch

    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            logger.debug("connection to rank %d of a group of %d: %s", peer, group.size(), error)


def name_groups_anew() -> None:
    """When no group is left: the next is named as the first one was.

    A join that failed was counted, and the next group would have another name than at its peers, who would not find it.
    """
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = 0
