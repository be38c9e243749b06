"""Aborts of an NCCL channel while another thread posts messages, and its end, over a Python communicator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dagrl.channels import ChannelSpec, nccl as module
from dagrl.channels.agreement import Agreement
from dagrl.channels.nccl import NcclChannel
from dagrl.errors import ChannelError

DEADLINE_S = 30.0


class NcclError(Exception):
    pass


class Communicator:
    """Records its calls. A send returns once an abort was requested; with `ends_by_abort`, once NCCL's abort runs."""

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

    def destroy(self) -> None:
        self.events.append("destroy")
        assert self.told.wait(DEADLINE_S)
        self.events.append("destroyed")

    def check_async_error(self) -> None:
        pass


@pytest.fixture
def open_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Communicator], NcclChannel]:
    """Opens a channel over a communicator, without NCCL and without a GPU."""

    def opened(communicator: Communicator) -> NcclChannel:
        nccl = SimpleNamespace(
            NcclError=NcclError,
            NCCL_UINT8=1,
            groupStart=lambda: None,
            groupEnd=lambda: None,
            get_unique_id=lambda: b"id",
            NcclCommunicator=lambda *_: communicator,
        )
        monkeypatch.setattr(module, "_import_nccl", lambda: nccl)
        monkeypatch.setattr("dagrl.channels.base.open_store", lambda spec: HashStore())
        monkeypatch.setattr(Agreement, "abort", lambda agreement, reason: communicator.told.set())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(cuda_stream=0))
        return NcclChannel(ChannelSpec("nccl", "127.0.0.1:1", 0, 2, DEADLINE_S))

    return opened


def abort_while_posting(channel: NcclChannel, communicator: Communicator) -> list[BaseException]:
    """Returns what the posting thread raised. It has ended, and so has NCCL's abort."""
    raised: list[BaseException] = []

    def post() -> None:
        try:
            channel._post([(torch.zeros(4), 1)], [])
        except Exception as error:
            raised.append(error)

    poster = threading.Thread(target=post)
    poster.start()
    assert communicator.entered.wait(DEADLINE_S)
    channel.abort("the scheduler said so")
    poster.join(DEADLINE_S)
    assert not poster.is_alive() and communicator.aborted.wait(DEADLINE_S)
    return raised


def test_an_abort_waits_for_a_thread_that_posts(
    open_with: Callable[[Communicator], NcclChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's abort frees the communicator, which a send in another thread is using."""
    monkeypatch.setattr(module, "_POSTING_S", DEADLINE_S)
    communicator = Communicator(ends_by_abort=False)
    send = communicator.send

    def slowly(*args: object) -> None:
        communicator.entered.set()
        assert communicator.told.wait(DEADLINE_S)
        time.sleep(0.2)  # an abort that does not wait runs meanwhile
        send(*args)

    monkeypatch.setattr(communicator, "send", slowly)
    channel = open_with(communicator)
    assert not abort_while_posting(channel, communicator)
    assert communicator.events == ["send ends", "abort"]
    with pytest.raises(ChannelError, match="the scheduler said so"):
        channel._post([(torch.zeros(4), 1)], [])
    assert communicator.events == ["send ends", "abort"]  # nothing is posted on a freed communicator


def test_an_abort_frees_a_thread_that_waits_for_a_peer_inside_nccl(
    open_with: Callable[[Communicator], NcclChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POSTING_S", 0.01)
    communicator = Communicator(ends_by_abort=True)
    (error,) = abort_while_posting(open_with(communicator), communicator)
    assert communicator.events == ["abort", "send ends"] and isinstance(error, NcclError)


def test_a_channel_closes_before_its_peers(
    open_with: Callable[[Communicator], NcclChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL destroys a communicator together with those of the same host."""
    monkeypatch.setattr(module, "_DESTROY_S", 0.05)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True))
    communicator = Communicator(ends_by_abort=False)
    channel = open_with(communicator)
    channel.close()
    assert communicator.events == ["destroy"]
    communicator.told.set()
    until = time.monotonic() + DEADLINE_S
    while communicator.events != ["destroy", "destroyed"]:
        assert time.monotonic() < until
        time.sleep(0.01)
