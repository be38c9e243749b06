"""Agreement of all ranks of a channel: no rank continues before all have voted.

It commits a refit: no rank uses a version before every rank has sent or holds all of it. This is a two-phase commit whose
decision is the last rank's vote. A rank that fails never votes, so no rank is told to continue.

Engines pause for a vote, so it takes little time. An agreement is one counter in the channel's store, which every request
returns; between processes of one host it is in memory that all map. Reasons of refusals are always in the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dagrl.errors import ChannelError
from dagrl.runtime.deadline import BackgroundThread, within
from dagrl.runtime.edges.futex import LONG_SPIN_S, fence, let_others_run

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch.distributed import Store  # type: ignore[attr-defined]

    from dagrl.channels.spec import ChannelSpec

_CHECK_S, _LINGER_S = 0.05, 0.5
_POLL_S_PER_RANK = 1e-5  # the store serves one request at a time
_AGAINST = -(1 << 32)  # added to the votes: a sum below 0 is a refusal, whatever follows
AGREEMENTS = 64
"""Agreements of which shared memory holds the votes."""

logger = logging.getLogger(__name__)


class Agreement:
    """One rank's end of the channel's agreements. They are numbered: all ranks must vote on all of them, in order.

    Requests to the store run on threads. torch's store ignores its deadline while the process of rank 0 is stopped.
    """

    def __init__(self, store: Store, spec: ChannelSpec) -> None:
        self._open_store: Store | None = store
        self._spec = spec
        self._number = 0
        self._cells: npt.NDArray[np.int64] | None = None  # [agreements, ranks]
        self._thread = BackgroundThread("dagrl-agreement")  # waits for the store

    @property
    def store(self) -> Store:
        assert self._open_store is not None, "channels check that they are open first"
        return self._open_store

    def use_memory(self, words: npt.NDArray[np.int64]) -> None:
        """Votes in these `AGREEMENTS * size` zeros from now on. All ranks map them, and call this after the same vote.

        A rank that is `AGREEMENTS` ahead overwrites its votes; the others then miss them, and fail at the deadline.
        """
        self._cells = words.reshape(AGREEMENTS, self._spec.size)

    def reach(self, check: Callable[[], None], refusal: str = "", *, wait: bool = True) -> None:
        """Implements `Channel.agree`. Calls `check` every 50 ms while waiting; it may raise to give up."""
        try:
            if self._cells is not None and not refusal:
                self._reach(check, refusal, wait)
            else:
                self._thread.start(lambda: self._reach(check, refusal, wait)).result(self._spec.timeout_s + _LINGER_S)
        except TimeoutError as error:
            raise ChannelError(
                f"{self._spec}: rank 0, which serves the channel's store, did not answer within {self._spec.timeout_s} s; "
                "check whether its process is stopped, then open a new channel"
            ) from error
        except RuntimeError as error:  # torch's DistError is one
            raise ChannelError(
                f"{self._spec}: rank 0, which serves the channel's store, is gone: {error}; open a new channel"
            ) from error

    def _reach(self, check: Callable[[], None], refusal: str, wait: bool) -> None:
        number = self._number
        self._number += 1
        if refusal:
            self._refuse(self.store, number, refusal)
            return
        votes = self._add(self.store, number, 1)
        if votes == self._spec.size:
            if self._cells is None or self._add(self.store, number - 1, 0) < 0:  # then there is something in the store
                self._thread.start(lambda: self._forget(number - 1))  # runs after this call has returned
        elif wait:
            self._wait(number, votes, check)

    def _wait(self, number: int, votes: int, check: Callable[[], None]) -> None:
        start = checked = time.monotonic()
        while votes != self._spec.size:
            if votes < 0:
                reason = within(self._spec.timeout_s, lambda: self.store.get(_refusal(number)).decode(), "dagrl-refusal")
                raise ChannelError(f"{self._spec}: {reason}; no rank uses the new version, replay the refit")
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                check()
            if now - start > self._spec.timeout_s:
                raise ChannelError(
                    f"{self._spec}: only {votes} of {self._spec.size} ranks voted within {self._spec.timeout_s} s; "
                    "look for the first error of the other ranks, then open a new channel"
                )
            if self._cells is not None and now - start < LONG_SPIN_S:
                let_others_run()
            else:
                time.sleep(_POLL_S_PER_RANK * self._spec.size)
            votes = self._add(self.store, number, 0)

    def abort(self, reason: str) -> None:
        """Tells waiting ranks that this one will not vote. Safe from any thread, and after the store is gone."""
        store = self._open_store
        if store is None:
            return
        try:
            within(_LINGER_S, lambda: self._refuse(store, self._number, reason), "dagrl-abort")
        except (RuntimeError, TimeoutError) as error:  # torch's DistError is one
            logger.debug("%s, aborting: %s", self._spec, error)

    def close(self) -> None:
        """Leaves the store. Rank 0 serves it, so it first gives the others a moment to read the last outcome."""
        store, self._open_store = self._open_store, None
        if store is None:
            return
        self._thread.close()
        try:
            within(2 * _LINGER_S, lambda: self._leave(store), "dagrl-leave")
        except (RuntimeError, TimeoutError) as error:  # torch's DistError is one: rank 0 left first, or is stopped
            logger.debug("%s, closing: %s", self._spec, error)

    def _leave(self, store: Store) -> None:
        deadline = time.monotonic() + _LINGER_S
        left = store.add("agree/left", 1)
        while self._spec.rank == 0 and left < self._spec.size and time.monotonic() < deadline:
            time.sleep(1e-3)
            left = store.add("agree/left", 0)

    def _refuse(self, store: Store, number: int, reason: str) -> None:
        store.set(_refusal(number), f"rank {self._spec.rank} failed: {reason}")
        self._add(store, number, _AGAINST)

    def _add(self, store: Store, number: int, votes: int) -> int:
        """Adds to the votes of an agreement, and returns their sum; below 0 if a rank refused.

        In memory, each rank writes its own cell: the number of the agreement, from 1, negative for a refusal.
        """
        if self._cells is None:
            return store.add(_votes(number), votes)
        row = self._cells[number % AGREEMENTS]
        if votes:
            fence()  # the vote vouches for what was written before it
            row[self._spec.rank] = (number + 1) * (1 if votes > 0 else -1)
        now = row.tolist()
        return _AGAINST if -(number + 1) in now else now.count(number + 1)

    def _forget(self, number: int) -> None:
        """Deletes an agreement that no rank reads any more: all of them have voted in the next."""
        for key in (_votes(number), _refusal(number)):
            self.store.delete_key(key)


def _votes(number: int) -> str:
    return f"agree/{number}/votes"


def _refusal(number: int) -> str:
    return f"agree/{number}/refusal"
