"""Signals that stop a run, also while Python would ignore an exception."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dagrl.errors import StopRequestedError
from dagrl.run.stop import ignoring_signals, keep_handlers, stop_on_signals


@pytest.fixture
def release_lock() -> Callable[[], None]:
    """Releases the lock of `logging` as after a fork, with a signal at that moment."""
    code = "def _releaseLock():\n    signal.raise_signal(signal.SIGINT)\n    return True"
    names: dict[str, Any] = {"__name__": "logging", "signal": signal}
    exec(compile(code, "logging", "exec"), names)  # noqa: S102
    return names["_releaseLock"]  # type: ignore[no-any-return]


def wait(seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def test_the_first_signal_requests_a_stop_and_the_second_interrupts() -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequestedError, match="resume=true"):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_terminal_that_closes_requests_a_stop_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[bool] = []
    request.addfinalizer(partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL)))  # not nohup's
    monkeypatch.setattr("dagrl.run.stop._leave_terminal", lambda: left.append(True))  # that of the tests stays
    with stop_on_signals() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert stop.requested and left


def test_under_nohup_a_terminal_may_close(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN)))
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested


def test_a_signal_while_a_lock_is_released_interrupts_later(release_lock: Callable[[], None]) -> None:
    with stop_on_signals() as stop, pytest.raises(KeyboardInterrupt), stop.at_once():
        release_lock()
        wait()
    assert stop.requested


def test_a_late_retry_only_requests_a_stop(release_lock: Callable[[], None]) -> None:
    with stop_on_signals() as stop:
        with stop.at_once():
            release_lock()
        wait(0.5)
        assert stop.requested


def test_signal_handlers_removed_by_native_code_are_restored() -> None:
    with stop_on_signals() as stop:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # SIG_DFL: the next one would kill this process
        keep_handlers()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with ignoring_signals():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
