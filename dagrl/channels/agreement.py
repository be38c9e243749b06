"""Agreement of all ranks of a channel: nobody goes on before everybody has done its part, through the channel's own store.

This is the second step of a refit: every rank has sent or holds all of a version, and only then is it taken up anywhere. It
is a two-phase commit whose decision is the last rank's vote: a rank that fails never votes, so nobody is told to go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dagrl.deadline import within
from dagrl.errors import ChannelError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from dagrl.channels.base import ChannelSpec

_POLL_S, _LOOK_S, _LINGER_S = 1e-4, 0.05, 0.5
_POLL_A_RANK_S = 1e-5  # the store serves one question at a time
_ALL = "all"
_THREAD = "dagrl-agreement"

logger = logging.getLogger(__name__)


class Agreement:
    """One rank's part in agreements, which are counted: all ranks must ask for the same ones, in the same order.

    The store is asked on threads: whatever its deadline, torch's waits for ever for the answer of a rank 0 that is stopped.
    """

    def __init__(self, store: Store, spec: ChannelSpec) -> None:
        self._open_store: Store | None = store
        self._spec = spec
        self._number = 0

    @property
    def _store(self) -> Store:
        assert self._open_store is not None, "channels look whether they are closed first"
        return self._open_store

    def reach(self, check: Callable[[], None], refusal: str = "", *, wait: bool = True) -> None:
        """`Channel.agree`; `check` is called now and then while this waits, and may raise to give up."""
        try:
            within(self._spec.timeout_s + _LINGER_S, lambda: self._reach(check, refusal, wait), _THREAD)
        except TimeoutError as error:
            raise ChannelError(
                f"{self._spec}: rank 0, which serves the channel's store, has not answered within {self._spec.timeout_s} s; "
                "look whether its process is stopped, and open a new channel"
            ) from error
        except RuntimeError as error:  # torch's DistError is one
            raise ChannelError(
                f"{self._spec}: rank 0, which serves the channel's store, is gone: {error}; open a new channel"
            ) from error

    def _reach(self, check: Callable[[], None], refusal: str, wait: bool) -> None:
        number = self._vote(refusal)
        if wait and not refusal:
            self._wait(number, check)

    def _vote(self, refusal: str) -> int:
        number = self._number
        self._number += 1
        if refusal:
            self._refuse(self._store, number, refusal)
        elif self._store.add(f"agree/{number}/votes", 1) == self._spec.size:
            self._store.set(f"agree/{number}/outcome", _ALL)
            self._forget(number - 1)
        return number

    def _wait(self, number: int, check: Callable[[], None]) -> None:
        start = time.monotonic()
        looked, pause = start, max(_POLL_S, _POLL_A_RANK_S * self._spec.size)
        key = f"agree/{number}/outcome"
        while not self._store.check([key]):
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                check()
            if now - start > self._spec.timeout_s:
                raise self._late(number)
            time.sleep(pause)
        outcome = self._store.get(key).decode()
        if outcome != _ALL:
            raise ChannelError(f"{self._spec}: {outcome}; nobody goes on, replay the refit")

    def _late(self, number: int) -> ChannelError:
        voted = int(self._store.add(f"agree/{number}/votes", 0))
        return ChannelError(
            f"{self._spec}: only {voted} of {self._spec.size} ranks did their part within {self._spec.timeout_s} s; "
            "look for the first error of the others, and open a new channel"
        )

    def abort(self, reason: str) -> None:
        """Let those that wait know that this rank will not vote; from any thread, and when the store is gone already."""
        store = self._open_store
        if store is None:
            return
        try:
            within(_LINGER_S, lambda: self._refuse(store, self._number, reason), _THREAD)
        except (RuntimeError, TimeoutError) as error:  # torch's DistError is one
            logger.debug("%s, aborting: %s", self._spec, error)

    def close(self) -> None:
        """Leave the store; rank 0, which serves it, gives the others a moment to read the last outcome."""
        store, self._open_store = self._open_store, None
        if store is None:
            return
        try:
            within(2 * _LINGER_S, lambda: self._leave(store), _THREAD)
        except (RuntimeError, TimeoutError) as error:  # torch's DistError is one: rank 0 left first, or is stopped
            logger.debug("%s, closing: %s", self._spec, error)

    def _leave(self, store: Store) -> None:
        deadline = time.monotonic() + _LINGER_S
        left = store.add("agree/left", 1)
        while self._spec.rank == 0 and left < self._spec.size and time.monotonic() < deadline:
            time.sleep(1e-3)
            left = store.add("agree/left", 0)

    def _refuse(self, store: Store, number: int, reason: str) -> None:
        store.set(f"agree/{number}/outcome", f"rank {self._spec.rank} could not do its part: {reason}")

    def _forget(self, number: int) -> None:
        """An agreement that everybody has left: all of them voted in the next."""
        for key in ("votes", "outcome"):
            self._store.delete_key(f"agree/{number}/{key}")
