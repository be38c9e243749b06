"""Stores of torch.distributed listen at one address, and on ports that the system gives to no other process."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from dagrl.runtime.store import open_tcp_store, reserve_port

WAIT = timedelta(seconds=30)
LISTENING = "0A"


def listeners(port: int) -> set[str]:
    """The local addresses, in hexadecimal, at which something on this machine listens on `port`."""
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == LISTENING]
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
    from dagrl.runtime import store

    port = reserve_port()
    with caplog.at_level("WARNING", "dagrl"):
        assert store._listen(host, port) is None
    assert ("listens on all interfaces" in caplog.text) == (host != "localhost")


def test_a_reserved_port_is_kept_for_a_store() -> None:
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=30))
    store.set("key", "value")
    assert TCPStore("127.0.0.1", port, 1, False, timeout=timedelta(seconds=30)).get("key") == b"value"
    with pytest.raises(RuntimeError, match="listen"):
        TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=1))
