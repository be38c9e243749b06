"""Commits a refit: no rank uses a version before every rank has sent it or holds all of it.

Weights are written in place, into the tensors that an engine computes with, so there is no old version to return to.
Instead an engine refuses to generate from the first byte of a refit until all ranks have agreed on it:

- If a rank fails or dies before its vote, no engine uses the version.
- If a rank dies after its vote, engines that learn the outcome use the complete new version; the others keep refusing.

No engine ever generates from a part of a version. One that refuses is opened by the next refit that is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagrl.errors import ChannelError, RunError, error_text

if TYPE_CHECKING:
    from dagrl.channels.base import Channel


@contextmanager
def commit_together(channel: Channel, *, wait: bool) -> Iterator[None]:
    """Runs this rank's part of a refit in the block, then votes; returns when all ranks have voted, without `wait` at once.

    Reports a failure of the block to the other ranks and raises it. A RunError, which the block may raise after its last
    message, is a refusal and keeps the channel usable; any other exception breaks the channel. Raises ChannelError if
    another rank fails.
    """
    try:
        yield
        channel.release()
    except BaseException as error:
        if isinstance(error, RunError) and not isinstance(error, ChannelError):
            channel.agree(error_text(error))
        else:
            channel.abort(error_text(error))  # the others wait for messages that this rank will not send
        raise
    channel.agree(wait=wait)
