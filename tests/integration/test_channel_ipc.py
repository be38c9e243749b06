"""The channel suite between processes of one host, over shared memory."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dagrl.channels import ChannelSpec, open_channel
from dagrl.errors import ChannelError
from tests import channel_cases as cases
from tests.channel_cases import Kind, run_case
from tests.channel_suite import ChannelSuite


class TestIpc(ChannelSuite):
    kind: ClassVar[Kind] = "ipc"
    ranks: ClassVar[int] = 2

    def test_mailboxes_are_given_back_and_never_under_a_peer_that_maps_them(self) -> None:
        """CUDA forbids to free memory that another process maps; host memory shows who does."""
        for result in run_case(cases.mailboxes, "ipc", 2):
            assert isinstance(result, tuple), result
            torn, before, after = result
            assert torn == [] and before == after, result


def waited_twice(place: cases.Place) -> object:
    """Errors of the waits for two messages of a peer that broke off, of the first again, and of one more receive."""
    channel = place.open()
    if place.rank == 1:
        channel.receive(torch.zeros(4), 0).wait()
        channel.abort("its weights are gone")
        return None
    first, second = (channel.receive(torch.zeros(4), 1) for _ in range(2))
    channel.send(torch.zeros(4), 1)  # from now on the peer may break off
    return [cases._error_of(one.wait)[0] for one in (first, second, first)]


def test_every_wait_for_a_message_that_did_not_come_raises() -> None:
    """The second message waits for the first, which nobody will take out of the mailbox any more."""
    found, _ = run_case(waited_twice, "ipc", 2, limit_s=20)
    assert isinstance(found, list), found
    assert all("rank 1 broke it" in error for error in found), found


@pytest.mark.parametrize("fails", ["os.pidfd_open", "mmap.mmap"])
def test_an_end_that_cannot_be_opened_leaves_nothing_open(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is gone before its process can be watched, and memory that cannot be mapped."""

    def fail(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(fails, fail)
    monkeypatch.setattr("dagrl.channels.ipc.open_store", lambda spec: HashStore())
    monkeypatch.setattr("dagrl.channels.ipc.IpcChannel._load", lambda channel, key: str(os.getppid()))
    before = os.listdir("/proc/self/fd")
    with pytest.raises((ChannelError, OSError), match="not here"):
        open_channel(ChannelSpec("ipc", "127.0.0.1:1", 0, 2))
    assert os.listdir("/proc/self/fd") == before
