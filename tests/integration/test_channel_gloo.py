"""The channel suite over Gloo and, between processes of one host, over shared memory."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dagrl.channels import ChannelSpec, open_channel
from dagrl.channels.ipc import IpcChannel
from dagrl.channels.ipc_memory import HostSegment
from dagrl.errors import ChannelError
from dagrl.runtime.store import reserve_port
from tests import channel_cases as cases
from tests.channel_cases import Kind, mapped_refit, run_case
from tests.channel_suite import ChannelSuite


class TestGloo(ChannelSuite):
    kind: ClassVar[Kind] = "gloo"
    ranks: ClassVar[int] = 4


def test_ranks_of_one_host_relay_what_is_sent_there_once() -> None:
    (sent, _, model), *receivers = run_case(cases.relayed, "gloo", 4)
    assert model <= sent < 1.05 * model  # alignment
    assert sum(passed_on for passed_on, _, _ in receivers) >= 2 * model
    assert all(received >= model for _, received, _ in receivers)


@pytest.mark.parametrize(
    ("address", "rank"), [("nowhere", 0), ("127.0.0.1:http", 0), ("127.0.0.1:1", 2), ("127.0.0.1:1", -1)]
)
def test_an_invalid_spec_is_rejected(address: str, rank: int) -> None:
    with pytest.raises(ChannelError):
        ChannelSpec("gloo", address, rank, 2)


def test_an_address_in_use_is_an_error() -> None:
    first = open_channel(ChannelSpec("gloo", f"127.0.0.1:{(port := reserve_port())}", 0, 1))
    with pytest.raises(ChannelError, match="the address must be free on the host of rank 0"):
        open_channel(ChannelSpec("gloo", f"127.0.0.1:{port}", 0, 1, timeout_s=2))
    first.close()


class TestIpc(ChannelSuite):
    kind: ClassVar[Kind] = "ipc"
    ranks: ClassVar[int] = 2

    def test_mailboxes_are_freed_and_never_while_a_peer_maps_them(self) -> None:
        """CUDA forbids freeing memory that another process maps. Host memory shows who maps it."""
        for result in run_case(cases.mailboxes, "ipc", 2):
            torn, before, after = result
            assert torn == [] and before == after, result

    def test_a_receiver_on_the_same_gpu_reads_the_senders_tensors(self) -> None:
        for rounds in run_case(mapped_refit, "ipc", 2):
            assert rounds[:-1] == [0] * 4 and rounds[-1] > 1, rounds


def waited_twice(place: cases.Place) -> object:
    """Returns the errors of waiting for two messages of an aborted peer, and for the first one again."""
    channel = place.open()
    if place.rank == 1:
        channel.receive(torch.zeros(4), 0).wait()
        channel.abort("its weights are gone")
        return None
    first, second = (channel.receive(torch.zeros(4), 1) for _ in range(2))
    channel.send(torch.zeros(4), 1)  # from now on the peer may abort
    return [cases._error_of(one.wait)[0] for one in (first, second, first)]


def test_every_wait_for_a_missing_message_raises() -> None:
    """The second message waits for the first, which is never taken from the mailbox."""
    found, _ = run_case(waited_twice, "ipc", 2, limit_s=20)
    assert all("rank 1 broke it" in error for error in found), found


@pytest.mark.parametrize("fails", ["os.pidfd_open", "mmap.mmap"])
def test_a_failed_opening_leaves_nothing_open(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer dies before its process can be watched, or memory cannot be mapped."""

    def fail(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(fails, fail)
    monkeypatch.setattr("dagrl.channels.base.open_store", lambda spec: HashStore())
    monkeypatch.setattr("dagrl.channels.ipc.IpcChannel._load", lambda channel, key: str(os.getppid()))
    before = os.listdir("/proc/self/fd")
    with pytest.raises((ChannelError, OSError), match="not here"):
        open_channel(ChannelSpec("ipc", "127.0.0.1:1", 0, 2))
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def both_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[IpcChannel]]:
    store = HashStore()
    monkeypatch.setattr("dagrl.channels.base.open_store", lambda spec: store)
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda rank: IpcChannel(ChannelSpec("ipc", "127.0.0.1:1", rank, 2, 2.0)), range(2)))
    yield ends
    for one in reversed(ends):  # rank 0 waits for the other
        one.close()


def lend(lender: IpcChannel, handle: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("dagrl.channels.ipc_memory._describe", lambda tensors: json.dumps([[handle], {}]))
    return lender.lend({})


def test_a_lender_does_not_wait_for_a_borrower_that_could_not_map_its_memory(
    both_ends: list[IpcChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    lender, borrower = both_ends
    number = lend(lender, f"host:{os.getpid()}:0:0:0", monkeypatch)
    with pytest.raises(ChannelError, match="shared memory of a peer cannot be opened"):
        borrower.borrow(0, number)
    lender.reclaim()


def test_a_lender_reclaims_from_a_borrower_that_broke_the_channel(
    both_ends: list[IpcChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    lender, borrower = both_ends
    segment = HostSegment(64)
    borrower.borrow(0, lend(lender, segment.handle, monkeypatch))
    borrower.abort("its engine failed")
    lender.reclaim()
    segment.close()
