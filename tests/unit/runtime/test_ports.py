"""Reserved ports: the system gives them to no other process, and a store can listen on them."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dagrl.runtime.ports import reserve_port


def test_a_reserved_port_is_kept_for_a_store() -> None:
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=30))
    store.set("key", "value")
    assert TCPStore("127.0.0.1", port, 1, False, timeout=timedelta(seconds=30)).get("key") == b"value"
    with pytest.raises(RuntimeError, match="listen"):
        TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=1))
