"""The commit of a refit: no rank takes a version up before every rank has sent, or holds, all of it.

Weights are written in place, into the tensors that an engine computes with, so there is no old version to fall back to.
What holds instead: from the first byte of a refit until all ranks have agreed on it an engine is closed, and refuses to
generate. If any rank fails or dies before its vote, no engine opens: the version is nowhere. If a rank dies after its vote,
while the others learn the outcome, those that learn it open with the whole new version and the rest stay closed; nobody ever
has a part of it, and nobody goes on with the one before. A closed engine opens with the next refit that is agreed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagrl.errors import ChannelError, RunError, error_text

if TYPE_CHECKING:
    from dagrl.channels.base import Channel


@contextmanager
def one_part_of_a_refit(channel: Channel, *, wait: bool) -> Iterator[None]:
    """One rank's part, done in the block. Returns when all ranks have done theirs, or without `wait` after its own vote.

    A failure in the block is told to the others, and raised: a RunError, which the block may raise when its last message
    has gone or come, as a refusal; any other breaks the channel. Raises ChannelError for a failure of another rank.
    """
    try:
        yield
        channel.release()
    except BaseException as error:
        if isinstance(error, RunError) and not isinstance(error, ChannelError):
            channel.agree(error_text(error))
        else:
            channel.abort(error_text(error))  # the others wait for messages that will not come
        raise
    channel.agree(wait=wait)
