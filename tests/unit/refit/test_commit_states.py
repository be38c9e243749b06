"""Random histories of refits: ranks refuse, raise, or die before or after their vote. Only whole versions are used."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.distributed import HashStore

from dagrl.channels.agreement import AGREEMENTS, Agreement
from dagrl.channels.spec import ChannelSpec
from dagrl.errors import ChannelError, RunError
from dagrl.refit.carry.commit import commit_together

SENDERS = 1
Fate = Literal["completes", "refuses", "raises", "dies before its vote", "dies after its vote"]
FATES = st.just("completes") | st.sampled_from(
    ["completes", "refuses", "raises", "dies before its vote", "dies after its vote"]
)
NOT_VOTING = {"refuses", "raises", "dies before its vote"}


class Died(BaseException):
    """The end of a simulated process, which runs nothing more."""


class End:
    """A rank's end of a channel that carries votes alone; a peer's death shows as a broken connection."""

    def __init__(
        self, store: HashStore, words: npt.NDArray[np.int64] | None, rank: int, size: int, peer_died: threading.Event
    ) -> None:
        self._agreement = Agreement(store, ChannelSpec("gloo", "memory:0", rank, size, timeout_s=20.0))
        if words is not None:
            self._agreement.use_memory(words)
        self._peer_died = peer_died
        self.fate: Fate = "completes"

    def release(self) -> None:
        if self.fate == "dies before its vote":
            self._die()

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        dies = self.fate == "dies after its vote"
        self._agreement.reach(self._check, refusal, wait=wait and not dies)
        if dies:
            self._die()

    def abort(self, reason: str) -> None:
        if self.fate != "dies before its vote":
            self._agreement.abort(reason)

    def _die(self) -> None:
        self._peer_died.set()
        raise Died

    def _check(self) -> None:
        if self._peer_died.is_set():
            raise ChannelError("a peer is gone")


class Commits(RuleBasedStateMachine):
    """One rank sends, the others are engines. An engine is open at the version that it may generate from, else None."""

    @initialize(engines=st.integers(1, 3), one_host=st.booleans())
    def begin(self, engines: int, one_host: bool) -> None:
        self.size, self.one_host = SENDERS + engines, one_host
        self.version = 0
        self.open: list[int | None] = [None] * engines
        self.whole = {0}  # versions that every rank has sent or holds
        self.connect()

    def connect(self) -> None:
        store, died = HashStore(), threading.Event()
        words = np.zeros(AGREEMENTS * self.size, np.int64) if self.one_host else None
        self.ends = [End(store, words, rank, self.size, died) for rank in range(self.size)]
        self.usable = True

    @precondition(lambda self: self.usable)
    @rule(data=st.data())
    def refit(self, data: st.DataObject) -> None:
        fates = data.draw(st.lists(FATES, min_size=self.size, max_size=self.size))
        self.version += 1
        if not NOT_VOTING & set(fates):
            self.whole.add(self.version)
        with ThreadPoolExecutor(self.size) as pool:
            outcomes = list(pool.map(self.take_part, range(self.size), fates))
        self.usable = set(fates) <= {"completes", "refuses"}
        if set(fates) == {"completes"}:
            assert outcomes == [None] * self.size and set(self.open) == {self.version}
        for fate, outcome in zip(fates[SENDERS:], outcomes[SENDERS:], strict=True):
            assert fate != "completes" or NOT_VOTING.isdisjoint(fates) or isinstance(outcome, ChannelError)

    def take_part(self, rank: int, fate: Fate) -> BaseException | None:
        """Runs a rank's part as a worker does: an engine closes, receives, commits, and opens."""
        engine, end = rank - SENDERS, self.ends[rank]
        end.fate = fate
        if engine >= 0:
            self.open[engine] = None
        channel: Any = end
        try:
            with commit_together(channel, wait=engine >= 0):
                if fate == "refuses":
                    raise RunError("verification failed")
                if fate == "raises":
                    raise ValueError("a bug")
        except BaseException as error:
            return error
        if engine >= 0:
            self.open[engine] = self.version
        return None

    @precondition(lambda self: not self.usable)
    @rule()
    def reconnect(self) -> None:
        """As after a failure: new processes in place of the dead, and a new channel."""
        self.connect()

    @invariant()
    def no_engine_uses_a_part_of_a_version(self) -> None:
        used = self.versions_used()
        assert len(set(used)) <= 1 and set(used) <= getattr(self, "whole", set())

    def versions_used(self) -> Sequence[int]:
        return [version for version in getattr(self, "open", []) if version is not None]


Commits.TestCase.settings = settings(deadline=None, max_examples=10, stateful_step_count=10)
TestCommits = Commits.TestCase
