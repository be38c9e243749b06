"""Calls that may block without end."""

from __future__ import annotations

import threading

import pytest

from dagrl.runtime.deadline import within


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
