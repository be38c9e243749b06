"""Aborts groups that wait for each other, with Python communicators in place of NCCL's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.runtime import process_groups
from dagrl.runtime.process_groups import break_groups


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end, for threads that still wait."""
    event = threading.Event()
    yield event
    event.set()


def nccl_group(abort: Any) -> Any:
    return SimpleNamespace(name=lambda: "nccl", abort=abort)


def test_communicators_that_end_only_together_are_aborted_at_once() -> None:
    """Like NCCL's: each ends only after a kernel that waits for another communicator, until that is aborted too."""
    together = threading.Barrier(3, timeout=30)
    assert break_groups([nccl_group(together.wait), nccl_group(together.wait)], [together.wait])


def test_a_communicator_that_does_not_end_delays_no_other(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CUDA graph refers to it. The others are aborted all the same."""
    monkeypatch.setattr(process_groups, "ABORT_S", 0.2)
    aborted = threading.Event()
    assert not break_groups([nccl_group(released.wait), nccl_group(aborted.set)])
    assert aborted.is_set()
    assert "1 NCCL communicators are still alive 0.2 s after they were aborted" in caplog.text


def test_an_abort_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("the peer is gone")

    with caplog.at_level(logging.WARNING):
        assert break_groups([nccl_group(fails)])
    assert "the peer is gone" in caplog.text
