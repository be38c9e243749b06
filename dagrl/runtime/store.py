"""Stores of `torch.distributed`, served at the address of the cluster's network alone."""

from __future__ import annotations

import ipaddress
import logging
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Ranks that may connect at once."""


def open_tcp_store(
    host: str, port: int, size: int | None, *, serves: bool, timeout: timedelta, waits: bool = True
) -> TCPStore:
    """Opens the store at `host`:`port` for `size` ranks, of which one serves it. With `waits`, returns when all are there.

    PyTorch's own server listens on all interfaces; this one on that of `host`, if it is an IP address of this machine.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listening = _listen(host, port) if serves else None
    descriptor = None if listening is None else listening.detach()  # the store closes it
    return TCPStore(host, port, size, serves, timeout, waits, master_listen_fd=descriptor)


def _listen(host: str, port: int) -> socket.socket | None:
    """Returns a socket that listens at this address alone; None if `host` is a name, or no address of this machine."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        logger.warning("cannot listen at %s:%d alone (%s); the store listens on all interfaces", host, port, error.strerror)
        return None
