"""Calls that may block without end."""

from __future__ import annotations

import threading
import weakref

import pytest

from dagrl.runtime.deadline import BackgroundThread, within


def test_within_returns_or_raises_what_the_call_does() -> None:
    assert within(20.0, lambda: threading.current_thread().name, "asks") == "asks"
    with pytest.raises(ValueError, match="no such thing"):
        within(20.0, raises, "asks")


def raises() -> None:
    raise ValueError("no such thing")


def test_a_call_that_does_not_end_is_abandoned() -> None:
    go_on = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, go_on.wait, "asks")
    thread = next(one for one in threading.enumerate() if one.name == "asks")
    assert thread.daemon
    go_on.set()
    thread.join(20.0)
    assert not thread.is_alive()


def test_a_background_thread_runs_calls_in_order_until_it_is_closed() -> None:
    background, done = BackgroundThread("asks"), list[int]()
    calls = [background.start(lambda n=n: done.append(n)) for n in range(3)]  # type: ignore[misc]
    with pytest.raises(ValueError, match="no such thing"):
        background.start(raises).result(20.0)
    thread = background.start(threading.current_thread)
    background.close()
    thread.result(20.0).join(20.0)
    assert thread.result().daemon and not thread.result().is_alive()
    assert done == [0, 1, 2] and all(call.done() for call in calls)


def test_a_background_thread_keeps_nothing_of_a_call() -> None:
    background, kept = BackgroundThread("asks"), threading.Event()
    gone = weakref.ref(kept)
    background.start(kept.is_set).result(20.0)
    del kept
    background.start(threading.current_thread).result(20.0)
    assert gone() is None
    background.close()
