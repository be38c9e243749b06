"""Ports for rendezvous, which nobody else is given between their choice and their use.

The system hands out ports to whoever connects or listens, many times a second where Ray starts workers: one that was only
looked up may be taken by the time it is used. `torch.distributed`'s stores listen with SO_REUSEADDR, as who reserves a port
here binds it without listening: Linux then lets the store listen beside it, and gives the port to nobody who asks for any.
"""

from __future__ import annotations

import socket
from collections import deque

_reserved: deque[socket.socket] = deque(maxlen=8)
"""The last ones of this process; by the time that more are asked for, the first are in use or given up."""


def reserve_port() -> int:
    """A TCP port of this host that is free, and stays so for whoever sets SO_REUSEADDR and listens on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _reserved.append(held)
    return int(held.getsockname()[1])
