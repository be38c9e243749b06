"""The suite that every channel passes, over Gloo and, between processes of one host, over shared memory."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


class ChannelSuite:
    """A subclass names the backend and the number of ranks, an even one of at least 2."""

    kind: ClassVar[Kind]
    ranks: ClassVar[int]
    notices_death: ClassVar[bool] = True  # at once; otherwise only at the deadline

    def deadline_s(self, otherwise: float) -> float:
        """Returns the channel deadline: long if a death is noticed without it, so that a busy machine does not reach it."""
        return 40.0 if self.notices_death else otherwise

    def test_messages_between_all_ranks_with_default_groups(self) -> None:
        assert run_case(cases.messages, self.kind, self.ranks) == ["done"] * self.ranks

    def test_messages_of_a_pair_keep_their_order(self) -> None:
        assert run_case(cases.order, self.kind, 2) == [list(range(20))] * 2

    def test_refit_puts_every_weight_in_its_place(self) -> None:
        reports = [report for result in run_case(cases.refit, self.kind, self.ranks) for report in result]
        assert sum(sent for _, sent, _ in reports) == sum(received for _, _, received in reports) > 0
        assert sorted(version for version, _, _ in reports) == sorted([1, 2, 3] * self.ranks)

    def test_a_killed_peer_is_named_within_the_deadline(self) -> None:
        deadline_s = self.deadline_s(8)
        *alive, dead = run_case(cases.killed_peer, self.kind, self.ranks, channel_timeout_s=deadline_s)
        assert dead is None
        for rank, ((error, seconds), (again, at_once)) in enumerate(alive):
            assert f"rank {self.ranks - 1 if rank == 0 else 0}" in error, error
            assert seconds < (deadline_s / 2 if self.notices_death else 14)
            assert again != "no error" and at_once < deadline_s / 2

    def test_a_peer_killed_in_a_refit_frees_the_others(self) -> None:
        deadline_s = self.deadline_s(8)
        results = run_case(cases.killed_in_a_refit, self.kind, self.ranks, channel_timeout_s=deadline_s)
        assert results[0] is None
        for result in results[1:]:
            assert "channel rank" in result[0] and result[1] < max(14, deadline_s / 2), result

    def test_a_silent_peer_ends_at_the_deadline(self) -> None:
        (error, seconds), _ = run_case(cases.silent_peer, self.kind, 2, channel_timeout_s=2)
        assert "2 s" in error and "channel rank 0 of 2" in error
        assert 1.7 < seconds < 30

    def test_abort_frees_this_rank_and_its_peers(self) -> None:
        deadline_s = self.deadline_s(12)
        results = run_case(cases.aborted, self.kind, self.ranks, channel_timeout_s=deadline_s)
        for rank, result in enumerate(results):
            freed_s = deadline_s / 2 if rank == 0 or self.notices_death else 18
            assert result[0] != "no error" and result[1] < freed_s, result
        assert "the scheduler said so" in str(results[0])

    def test_an_abort_frees_a_posting_thread_and_leaves_nothing(self) -> None:
        deadline_s = self.deadline_s(12)
        for result in run_case(cases.aborted_while_posting, self.kind, 2, channel_timeout_s=deadline_s):
            *errors, counts = result
            for error, seconds in errors:
                assert error != "no error" and seconds < (deadline_s / 2 if self.notices_death else 18), result
            assert all(last <= early for early, last in zip(counts[1], counts[-1], strict=True)), counts

    def test_all_ranks_agree_or_none_does(self) -> None:
        *others, dead = run_case(cases.agreement, self.kind, self.ranks, channel_timeout_s=5)
        assert dead is None
        for rank, (voted, after, refused, (died, seconds)) in enumerate(others):
            assert rank == 1 or after >= voted
            assert f"rank {self.ranks - 1} failed: it holds other weights" in refused
            assert ("ranks voted within" in died or "ended" in died or "broke" in died) and seconds < 30, died

    @pytest.mark.parametrize("failing", [0, 1], ids=["source", "destination"])
    def test_an_error_in_a_refit_breaks_the_channel_for_both_ends(self, failing: int) -> None:
        """No rank waits for the deadline, and no message of one refit is received in the next."""
        case = partial(cases.failing_rank, failing=failing)
        results = run_case(case, self.kind, 2, channel_timeout_s=self.deadline_s(8))
        for rank, result in enumerate(results):
            (first, _), (second, seconds), (third, at_once) = result
            assert first == ""
            assert ("its shape is (3, 3)" if rank == failing else "ChannelError") in second, second
            assert "ChannelError" in third, third
            assert max(seconds, at_once) < (20 if self.notices_death else 16)

    def test_an_absent_rank_is_an_error_on_the_others(self) -> None:
        *came, _ = run_case(cases.absent_rank, self.kind, self.ranks, channel_timeout_s=2)
        for result in came:
            assert "could not join within 2 s" in result[0] and result[1] < 30, result

    def test_opening_and_closing_repeatedly_leaves_nothing(self) -> None:
        for counts in run_case(cases.reopened, self.kind, 2):
            assert all(last <= early for early, last in zip(counts[1], counts[-1], strict=True)), counts

    def test_unsupported_messages_are_rejected(self) -> None:
        for itself, absent, strided, elsewhere, *closed in run_case(cases.refused, self.kind, 2):
            assert "no peer" in itself and "no peer 7" in absent
            assert "contiguous" in strided and "meta" in elsewhere
            assert len(closed) == 2 and all("closed" in error for error in closed), closed


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
