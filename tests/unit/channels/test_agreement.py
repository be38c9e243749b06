"""Agreements of ranks that share a store, and aborts of NCCL channels: waiting, refusals, deadlines, what is left."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dagrl.channels import ChannelSpec, nccl as module
from dagrl.channels.agreement import AGREEMENTS, Agreement
from dagrl.channels.nccl import NcclChannel
from dagrl.errors import ChannelError
from tests.integration.processes import ends_within


def ranks(size: int, timeout_s: float = 20.0, one_host: bool = False) -> tuple[HashStore, list[Agreement]]:
    store, words = HashStore(), np.zeros(AGREEMENTS * size, np.int64)
    ends = [Agreement(store, ChannelSpec("ipc", "127.0.0.1:1", rank, size, timeout_s)) for rank in range(size)]
    for one in ends:
        if one_host:
            one.use_memory(words)
    return store, ends


@pytest.fixture(params=[False, True], ids=["store", "memory"])
def one_host(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def nothing() -> None: ...


def test_a_refusal_reaches_all_other_ranks_and_ends_one_agreement_only(one_host: bool) -> None:
    _, (refuses, *others) = ranks(3, one_host=one_host)
    refuses.reach(nothing, "it holds other weights")
    for one in others:
        with pytest.raises(ChannelError, match="rank 0 failed: it holds other weights; no rank uses"):
            one.reach(nothing)
    refuses.reach(nothing, wait=False)
    others[0].reach(nothing, wait=False)
    others[1].reach(nothing)


def test_an_abort_frees_ranks_that_wait_for_its_vote(one_host: bool) -> None:
    store, (waits, aborts) = ranks(2, one_host=one_host)
    for one in (waits, aborts):
        one.reach(nothing, wait=False)
    aborts.abort("its weights are gone")
    with pytest.raises(ChannelError, match="rank 1 failed: its weights are gone"):
        waits.reach(nothing)
    aborts.close()
    aborts.abort("again")  # after its store is closed
    assert b"again" not in store.get("agree/1/refusal")


def test_a_wait_calls_its_check_and_ends_at_the_deadline(one_host: bool) -> None:
    _, (votes, waits, _) = ranks(3, timeout_s=0.1, one_host=one_host)
    votes.reach(nothing, wait=False)
    checks: list[None] = []
    with pytest.raises(ChannelError, match=r"only 2 of 3 ranks voted within 0.1 s"):
        waits.reach(lambda: checks.append(None))
    assert 1 <= len(checks) <= 2  # every 0.05 s, as a check asks the system about each process

    with pytest.raises(ChannelError, match=r"^the process of rank 2 ended"):
        waits.reach(Mock(side_effect=ChannelError("the process of rank 2 ended")))


def test_finished_agreements_are_deleted_from_the_store(one_host: bool) -> None:
    store, both = ranks(2, one_host=one_host)
    both[0].reach(nothing, "it holds other weights")
    both[1].reach(nothing, wait=False)
    assert store.check(["agree/0/refusal"])
    counts = []
    for _ in range(4):
        for one in both:
            one.reach(nothing, wait=one is both[1])
        both[1]._thread.start(nothing).result(20.0)  # the last to vote deletes after it has returned
        counts.append(store.num_keys())
    assert counts == counts[:1] * 4 and not store.check(["agree/0/refusal"])


@pytest.mark.parametrize("answers", [0, 1])
def test_the_error_of_a_lost_store_names_rank_0(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost before the vote, or while waiting for the others."""
    gone = RuntimeError("Connection reset by peer")
    monkeypatch.setattr(HashStore, "add", Mock(side_effect=chain([1] * answers, repeat(gone))))
    _, (_, agreement) = ranks(2)
    with pytest.raises(ChannelError, match="rank 0, which serves the channel's store, is gone: Connection reset"):
        agreement.reach(nothing)
    monkeypatch.setattr(HashStore, "set", Mock(side_effect=gone))
    agreement.abort("its weights are gone")
    agreement.close()
    agreement.close()


def test_a_store_that_does_not_answer_fails_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the process of rank 0 is stopped, torch's store waits without a deadline."""
    monkeypatch.setattr("dagrl.channels.agreement._LINGER_S", 0.02)
    answers = threading.Event()
    for question in ("add", "set"):
        monkeypatch.setattr(HashStore, question, lambda *_: answers.wait())
    _, (_, agreement) = ranks(2, timeout_s=0.02)
    with pytest.raises(ChannelError, match=r"rank 0, .* did not answer within 0.02 s; check whether its process"):
        agreement.reach(nothing)
    agreement.abort("its weights are gone")
    agreement.close()
    answers.set()


@pytest.mark.parametrize("linger_s", [60.0, 0.02], ids=["last", "even if others never do"])
def test_rank_0_leaves_after_the_others(linger_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store ends with it, and the others may still read the last outcome."""
    monkeypatch.setattr("dagrl.channels.agreement._LINGER_S", linger_s)
    _, (serves, *others) = ranks(3)
    closing = threading.Thread(target=serves.close, daemon=True)
    closing.start()
    if linger_s > 1.0:
        others[0].close()
        closing.join(0.02)
        assert closing.is_alive()
        others[1].close()
    closing.join(20.0)
    assert not closing.is_alive()


DEADLINE_S = 30.0


class NcclError(Exception): ...


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

    def check_async_error(self) -> None: ...


Open = Callable[[Communicator], NcclChannel]


@pytest.fixture
def open_with(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a channel over a communicator, without NCCL and without a GPU."""

    def opened(communicator: Communicator) -> NcclChannel:
        nccl = Mock(NcclError=NcclError, NCCL_UINT8=1, NcclCommunicator=lambda *_: communicator)
        nccl.get_unique_id.return_value = b"id"
        monkeypatch.setattr(module, "_import_nccl", lambda: nccl)
        monkeypatch.setattr("dagrl.channels.base.open_store", lambda spec: HashStore())
        monkeypatch.setattr(Agreement, "abort", lambda agreement, reason: communicator.told.set())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(cuda_stream=0))
        return NcclChannel(ChannelSpec("nccl", "127.0.0.1:1", 0, 2, DEADLINE_S))

    return opened


def abort_while_posting(channel: NcclChannel, communicator: Communicator) -> BaseException | None:
    """Returns what the posting thread raised. It has ended, and so has NCCL's abort."""
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(channel._post, [(torch.zeros(4), 1)], [])
        assert communicator.entered.wait(DEADLINE_S)
        channel.abort("the scheduler said so")
        error = posted.exception(DEADLINE_S)
    assert communicator.aborted.wait(DEADLINE_S)
    return error


def test_an_abort_waits_for_a_thread_that_posts(open_with: Open, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert abort_while_posting(channel, communicator) is None
    assert communicator.events == ["send ends", "abort"]
    with pytest.raises(ChannelError, match="the scheduler said so"):
        channel._post([(torch.zeros(4), 1)], [])
    assert communicator.events == ["send ends", "abort"]  # nothing is posted on a freed communicator


def test_an_abort_frees_a_thread_that_waits_for_a_peer_inside_nccl(open_with: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POSTING_S", 0.01)
    communicator = Communicator(ends_by_abort=True)
    error = abort_while_posting(open_with(communicator), communicator)
    assert communicator.events == ["abort", "send ends"] and isinstance(error, NcclError)


def test_a_channel_closes_before_its_peers(open_with: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL destroys a communicator together with those of the same host."""
    monkeypatch.setattr(module, "_DESTROY_S", 0.05)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True))
    communicator = Communicator(ends_by_abort=False)
    channel = open_with(communicator)
    channel.close()
    assert communicator.events == ["destroy"]
    communicator.told.set()
    assert ends_within(DEADLINE_S, lambda: communicator.events != ["destroy", "destroyed"])
