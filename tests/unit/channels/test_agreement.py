"""Agreements of ranks that share a store: waiting, refusals, deadlines, and keys left in the store."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dagrl.channels import ChannelSpec
from dagrl.channels.agreement import AGREEMENTS, Agreement
from dagrl.errors import ChannelError


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

    def gives_up() -> None:
        raise ChannelError("the process of rank 2 ended")

    with pytest.raises(ChannelError, match=r"^the process of rank 2 ended"):
        waits.reach(gives_up)


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

    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    counts = iter([1] * answers)
    monkeypatch.setattr(HashStore, "add", lambda *_: next(counts, 0) or gone())
    _, (_, agreement) = ranks(2)
    with pytest.raises(ChannelError, match="rank 0, which serves the channel's store, is gone: Connection reset"):
        agreement.reach(nothing)
    monkeypatch.setattr(HashStore, "set", gone)
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
