"""Channel over Gloo: host memory and TCP, for machines without GPUs.

`ProcessGroupGloo` is built directly on its own TCPStore. It needs no default process group and leaves an existing one alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from dagrl.channels.base import Channel, PendingMessage, as_bytes, check_message
from dagrl.channels.spec import ChannelSpec, cannot_join
from dagrl.errors import ChannelError
from dagrl.runtime.process_groups import break_gloo_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work  # type: ignore[attr-defined]

_TAG = 0


class GlooChannel(Channel):
    """One rank's end of a Gloo channel. A wait for a message blocks the host."""

    def __init__(self, spec: ChannelSpec) -> None:
        super().__init__(spec)
        self._lock = threading.Lock()
        try:
            self._group: ProcessGroup | None = _join(spec, self._agreement.store)
        except BaseException:
            self._agreement.close()  # the caller gets no object to close
            raise

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[PendingMessage]:
        posted = [self._post(tensor, peer, "recv", "from") for tensor, peer in receives]
        return [*posted, *(self._post(tensor, peer, "send", "to") for tensor, peer in sends)]

    def _post(self, tensor: torch.Tensor, peer: int, operation: str, preposition: str) -> PendingMessage:
        check_message(self.spec, tensor, peer, "cpu")
        what = f"{operation} of {tensor.nbytes} bytes {preposition} rank {peer}"
        self._check_usable(what)
        try:
            work = getattr(self._group, operation)([as_bytes(tensor)], peer, _TAG)
        except RuntimeError as error:
            raise self._broken(what, error) from error
        return PendingMessage(lambda: self._wait_for(work, what))

    def _wait_for(self, work: Work, what: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(what, error) from error

    def _check_usable(self, what: str = "agreement") -> None:
        if self._group is None or self._reason is not None:
            raise ChannelError(
                f"{what} on a {'closed' if self._group is None else 'broken'} channel ({self._reason}); open a new one"
            )

    def _broken(self, what: str, error: Exception) -> ChannelError:
        """Aborts the channel, so that no peer waits for this rank, and returns the error of a failed message."""
        reason = self._reason or str(error).partition("] ")[2] or str(error)
        self.abort(f"{what} failed: {reason}")
        return ChannelError(f"{self.spec}: {what} failed: {reason} (deadline {self.spec.timeout_s} s); open a new channel")

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None or self._group is None:
                return
            self._reason = reason
            break_gloo_group(self._group)
            self._agreement.abort(reason)

    def close(self) -> None:
        """Closes connections, threads and the store."""
        with self._lock:
            self._group = None
            self._agreement.close()


def _join(spec: ChannelSpec, store: Store) -> ProcessGroup:
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    try:
        group = ProcessGroupGloo(PrefixStore("gloo", store), spec.rank, spec.size, spec.timeout)
    except RuntimeError as error:  # torch's DistError is one
        raise cannot_join(spec, error) from error
    return cast("ProcessGroup", group)  # a Backend, with the same calls
