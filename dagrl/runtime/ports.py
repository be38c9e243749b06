"""Reserves a port until the rendezvous binds it.

The system hands out ports to every process that connects or listens, many times a second while Ray starts workers. A port
that was only looked up may be taken before it is used. So the port is bound here with SO_REUSEADDR, without listening.
`torch.distributed` stores listen with SO_REUSEADDR as well: Linux lets them bind the reserved port and gives it to no other
process.
"""

from __future__ import annotations

import socket
from collections import deque

_reserved: deque[socket.socket] = deque(maxlen=8)
"""The latest reservations of this process. By the time one is dropped, its port is in use or abandoned."""


def reserve_port() -> int:
    """Returns a free TCP port of this host. Only a process that sets SO_REUSEADDR can listen on it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    _reserved.append(reservation)
    return int(reservation.getsockname()[1])
