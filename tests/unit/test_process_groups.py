"""An end to groups that wait for each other, with communicators of Python in place of NCCL's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl import process_groups
from dagrl.process_groups import break_groups


@pytest.fixture
def told() -> Iterator[threading.Event]:
    """Set at the end, for threads that still wait."""
    event = threading.Event()
    yield event
    event.set()


def nccl_group(abort: Any) -> Any:
    return SimpleNamespace(name=lambda: "nccl", abort=abort)


def test_communicators_that_end_only_together_are_aborted_at_once() -> None:
    """As NCCL's: the end of each waits for a kernel that waits in another, until that is aborted as well."""
    together = threading.Barrier(3, timeout=30)
    assert break_groups([nccl_group(together.wait), nccl_group(together.wait)], [together.wait])


def test_a_communicator_that_does_not_end_holds_nobody_up(
    told: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CUDA graph refers to it; the others are aborted all the same."""
    monkeypatch.setattr(process_groups, "ABORT_S", 0.2)
    aborted = threading.Event()
    assert not break_groups([nccl_group(told.wait), nccl_group(aborted.set)])
    assert aborted.is_set()
    assert "1 NCCL communicators have not ended 0.2 s after they were aborted" in caplog.text


def test_an_abort_that_raises_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("the peer is gone")

    with caplog.at_level(logging.WARNING):
        assert break_groups([nccl_group(fails)])
    assert "the peer is gone" in caplog.text
