"""Agreements of ranks that share a store: who waits, what all are told, and what is left behind."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dagrl.channels import ChannelSpec
from dagrl.channels.agreement import Agreement
from dagrl.errors import ChannelError


def ranks(size: int, timeout_s: float = 20.0) -> tuple[HashStore, list[Agreement]]:
    store = HashStore()
    return store, [Agreement(store, ChannelSpec("ipc", "127.0.0.1:1", rank, size, timeout_s)) for rank in range(size)]


def nothing() -> None: ...


def test_nobody_who_waits_goes_on_before_the_last_has_voted() -> None:
    _, (first, waits, last) = ranks(3)
    first.reach(nothing, wait=False)  # goes on
    went_on = threading.Event()
    waiting = threading.Thread(target=lambda: (waits.reach(nothing), went_on.set()))
    waiting.start()
    assert not went_on.wait(0.02)
    last.reach(nothing)
    assert went_on.wait(20.0)
    waiting.join()


def test_a_refusal_is_told_to_all_others_and_costs_one_agreement() -> None:
    _, (refuses, *others) = ranks(3)
    refuses.reach(nothing, "it holds other weights")
    for one in others:
        with pytest.raises(ChannelError, match="rank 0 could not do its part: it holds other weights; nobody goes on"):
            one.reach(nothing)
    refuses.reach(nothing, wait=False)
    others[0].reach(nothing, wait=False)
    others[1].reach(nothing)


def test_who_breaks_off_frees_those_that_wait_for_its_vote() -> None:
    store, (waits, breaks) = ranks(2)
    for one in (waits, breaks):
        one.reach(nothing, wait=False)
    breaks.abort("its weights are gone")
    with pytest.raises(ChannelError, match="rank 1 could not do its part: its weights are gone"):
        waits.reach(nothing)
    breaks.close()
    breaks.abort("again")  # its store is gone already
    assert b"again" not in store.get("agree/1/outcome")


def test_a_wait_looks_about_and_ends_at_the_deadline() -> None:
    _, (votes, waits, _) = ranks(3, timeout_s=0.1)
    votes.reach(nothing, wait=False)
    looked: list[None] = []
    for _ in range(2):  # who tells how many have voted does not vote
        with pytest.raises(ChannelError, match=r"only 2 of 3 ranks did their part within 0.1 s"):
            waits._wait(waits._vote("") if not looked else 0, lambda: looked.append(None))
    assert 1 <= len(looked) <= 4  # every 0.05 s: it asks the system for each process

    def gives_up() -> None:
        raise ChannelError("the process of rank 2 ended")

    with pytest.raises(ChannelError, match=r"^the process of rank 2 ended"):
        waits.reach(gives_up)


def test_agreements_that_all_have_left_are_forgotten() -> None:
    store, both = ranks(2)
    counts = []
    for _ in range(4):
        for one in both:
            one.reach(nothing, wait=one is both[1])
        counts.append(store.num_keys())
    assert counts == counts[:1] * 4


@pytest.mark.parametrize("question", ["add", "check"])
def test_a_store_that_is_gone_is_said_to_be_that_of_rank_0(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(HashStore, question, gone)
    _, (_, agreement) = ranks(2)
    with pytest.raises(ChannelError, match="rank 0, which serves the channel's store, is gone: Connection reset"):
        agreement.reach(nothing)
    monkeypatch.setattr(HashStore, "set", gone)
    agreement.abort("its weights are gone")
    agreement.close()
    agreement.close()


def test_a_store_that_does_not_answer_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a process that is stopped, for which torch's waits for ever."""
    monkeypatch.setattr("dagrl.channels.agreement._LINGER_S", 0.02)
    answers = threading.Event()
    for question in ("add", "set", "check"):
        monkeypatch.setattr(HashStore, question, lambda *_: answers.wait())
    _, (_, agreement) = ranks(2, timeout_s=0.02)
    with pytest.raises(ChannelError, match=r"rank 0, .* has not answered within 0.02 s; look whether its process"):
        agreement.reach(nothing)
    agreement.abort("its weights are gone")
    agreement.close()
    answers.set()


def test_rank_0_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store ends with it, and the others may still read what was agreed."""
    monkeypatch.setattr("dagrl.channels.agreement._LINGER_S", 60.0)
    _, (serves, *others) = ranks(3)
    closing = threading.Thread(target=serves.close)
    closing.start()
    others[0].close()
    closing.join(0.02)
    assert closing.is_alive()
    others[1].close()
    closing.join(20.0)
    assert not closing.is_alive()


def test_rank_0_leaves_though_others_never_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.channels.agreement._LINGER_S", 0.02)
    _, (serves, *_) = ranks(3)
    closing = threading.Thread(target=serves.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
