"""An abort of an NCCL channel while messages are posted, with a communicator of Python in place of NCCL's."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dagrl.channels import ChannelSpec
from dagrl.channels import nccl as module
from dagrl.channels.nccl import NcclChannel
from dagrl.errors import ChannelError

DEADLINE_S = 30.0


class NcclError(Exception):
    pass


class Communicator:
    """Notes what it is asked for. A send goes on once an abort was asked for; `ends_by_abort`: when NCCL's is there."""

    def __init__(self, ends_by_abort: bool) -> None:
        self.events: list[str] = []
        self.entered, self.aborted, self.told = threading.Event(), threading.Event(), threading.Event()
        self._until = self.aborted if ends_by_abort else self.told

    def send(self, *_: object) -> None:
        self.entered.set()
        assert self._until.wait(DEADLINE_S)
        self.events.append("send ends")
        if self.aborted.is_set():
            raise NcclError("aborted")

    def abort(self) -> None:
        self.events.append("abort")
        self.aborted.set()

    def check_async_error(self) -> None:
        pass


def channel_of(communicator: Communicator) -> NcclChannel:
    """A channel that has been opened, without a GPU."""
    channel = NcclChannel.__new__(NcclChannel)
    channel.spec = ChannelSpec("nccl", "127.0.0.1:1", 0, 2, DEADLINE_S)
    channel._nccl = SimpleNamespace(NcclError=NcclError, NCCL_UINT8=1, groupStart=lambda: None, groupEnd=lambda: None)
    channel._stream = SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]
    channel._agreement = SimpleNamespace(abort=lambda reason: communicator.told.set())  # type: ignore[assignment]
    channel._lock, channel._posting, channel._graphs_lock = threading.Lock(), threading.Lock(), threading.RLock()
    channel._communicator, channel._reason, channel._aborting = communicator, None, None
    channel._graphs, channel._recording, channel._host_until = set(), False, None  # type: ignore[assignment]
    return channel


def aborted_while_it_posts(communicator: Communicator) -> tuple[NcclChannel, list[BaseException]]:
    """The channel, and what its poster raised; both threads have ended."""
    channel, raised = channel_of(communicator), list[BaseException]()

    def post() -> None:
        try:
            channel._post([(torch.zeros(4), 1)], [])
        except Exception as error:
            raised.append(error)

    poster = threading.Thread(target=post)
    poster.start()
    assert communicator.entered.wait(DEADLINE_S)
    channel.abort("the scheduler said so")
    for thread in (poster, channel._aborting):
        assert thread is not None
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return channel, raised


def test_a_communicator_is_not_freed_under_who_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort frees what a send in another thread works on."""
    monkeypatch.setattr(module, "_POSTING_S", DEADLINE_S)
    communicator = Communicator(ends_by_abort=False)
    send = communicator.send

    def slowly(*args: object) -> None:
        assert communicator.told.wait(DEADLINE_S)
        time.sleep(0.2)  # an abort that does not wait comes meanwhile
        send(*args)

    monkeypatch.setattr(communicator, "send", lambda *args: (communicator.entered.set(), slowly(*args)))
    channel, raised = aborted_while_it_posts(communicator)
    assert communicator.events == ["send ends", "abort"] and not raised
    with pytest.raises(ChannelError, match="the scheduler said so"):
        channel._post([(torch.zeros(4), 1)], [])
    assert communicator.events == ["send ends", "abort"]  # nothing is posted on what was freed


def test_who_waits_for_a_peer_inside_nccl_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POSTING_S", 0.01)
    communicator = Communicator(ends_by_abort=True)
    _, (error,) = aborted_while_it_posts(communicator)
    assert communicator.events == ["abort", "send ends"] and isinstance(error, NcclError)
