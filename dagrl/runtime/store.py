"""Ports and stores of a rendezvous of `torch.distributed`.

The system hands out ports to every process that connects or listens, many times a second while Ray starts workers. A port
that was only looked up may be taken before it is used. So the port is bound here with SO_REUSEADDR, without listening.
`torch.distributed` stores listen with SO_REUSEADDR as well: Linux lets them bind the reserved port and gives it to no other
process.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

BACKLOG = 4096  # ranks that may connect at once

_reserved: deque[socket.socket] = deque(maxlen=8)
"""The latest reservations of this process. By the time one is dropped, its port is in use or abandoned."""


def reserve_port() -> int:
    """Returns a free TCP port of this host. Only a process that sets SO_REUSEADDR can listen on it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    _reserved.append(reservation)
    return int(reservation.getsockname()[1])


def open_tcp_store(host: str, port: int, size: int, *, serves: bool, timeout: timedelta) -> TCPStore:
    """Opens the store at `host`:`port` for `size` ranks, of which one serves it. Returns when all are there.

    PyTorch's own server listens on all interfaces; this one on that of `host`, if it is an IP address of this machine.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listening = _listen(host, port) if serves else None
    descriptor = None if listening is None else listening.detach()  # the store closes it
    return TCPStore(host, port, size, serves, timeout, master_listen_fd=descriptor)


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
