"""Stores of torch.distributed at one address and on ports of no other process, and groups that are aborted together."""

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore

from dagrl.runtime import process_groups, store
from dagrl.runtime.process_groups import break_groups
from dagrl.runtime.store import open_tcp_store, reserve_port

WAIT = timedelta(seconds=30)


def listeners(port: int) -> set[str]:
    """The local addresses, in hexadecimal, at which something on this machine listens on `port`."""
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]  # that listen
    return {address for address, number in places if int(number, 16) == port}


def test_a_store_listens_at_its_address_alone() -> None:
    port = reserve_port()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(open_tcp_store, "127.0.0.1", port, 2, serves=rank == 0, timeout=WAIT) for rank in range(2)]
        first, second = (end.result() for end in ends)
    assert listeners(port) == {"0100007F"}
    first.set("key", "value")
    assert second.get("key") == b"value"


@pytest.mark.parametrize("host", ["localhost", "192.0.2.1"], ids=["a name", "not of this machine"])
def test_where_that_cannot_be_known_it_listens_as_torchs_own(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """A name may have another address on each host. Behind address translation no socket has the address that peers use."""
    port = reserve_port()
    with caplog.at_level("WARNING", "dagrl"):
        assert store._listen(host, port) is None
    assert ("listens on all interfaces" in caplog.text) == (host != "localhost")


def test_a_reserved_port_is_kept_for_a_store() -> None:
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    first = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=30))
    first.set("key", "value")
    assert TCPStore("127.0.0.1", port, 1, False, timeout=timedelta(seconds=30)).get("key") == b"value"
    with pytest.raises(RuntimeError, match="listen"):
        TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=1))


def nccl_group(abort: Any) -> Any:
    return SimpleNamespace(name=lambda: "nccl", abort=abort)


def test_communicators_that_end_only_together_are_aborted_at_once() -> None:
    """Like NCCL's: each ends only after a kernel that waits for another communicator, until that is aborted too."""
    together = threading.Barrier(3, timeout=30)
    assert break_groups([nccl_group(together.wait), nccl_group(together.wait)], [together.wait])


def test_a_communicator_that_does_not_end_delays_no_other(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A CUDA graph refers to it. The others are aborted all the same."""
    monkeypatch.setattr(process_groups, "ABORT_S", 0.2)
    released, aborted = threading.Event(), threading.Event()
    try:
        assert not break_groups([nccl_group(released.wait), nccl_group(aborted.set)])
        assert aborted.is_set()
        assert "1 NCCL communicators are still alive 0.2 s after they were aborted" in caplog.text
    finally:
        released.set()


def test_an_abort_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert break_groups([nccl_group(Mock(side_effect=RuntimeError("the peer is gone")))])
    assert "the peer is gone" in caplog.text
