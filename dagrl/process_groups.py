"""What torch's process groups do not offer: an end to what waits in a Gloo group, and names that begin anew."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_ABORT_TAG = 1 << 20  # nobody sends with it


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
