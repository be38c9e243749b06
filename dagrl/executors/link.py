"""An edge between two hosts: one TCP connection, from the process that writes to the one that reads.

Ray's own channels between hosts poll on both sides and go through two raylets and the object store. Here the writer listens,
the reader connects when it first reads, and a message is one send of its parts, laid out as in a ring's slot, so that
arrays are received once and then used in place. Neither side unpickles anything, nor sends any message, before the other
has shown the secret that was made for this edge and came through Ray, whose connections are authenticated; the listening
socket is closed once its reader has come. As Ray's own transfers, messages are not encrypted.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dagrl.executors.futex import Patience, let_others_run
from dagrl.executors.memory import EdgeClosedError, EdgeTimeoutError, MessageTooLargeError, aligned, count_copied, cut

Memory = npt.NDArray[np.uint8]

SECRET_BYTES = 32
_PREFIX = struct.Struct("<Q")  # bytes of the message that follows
_LOOK_S = 0.5  # how long to wait at most before looking whether this side was closed
POOL = 4
"""Memories of large messages that a reader remembers to use again; what it has forgotten ends with its last array."""

_STRANGER_S = 2.0  # how long one who connects may take to show the secret
_JOINED_BYTES = 64 << 10
"""Messages up to this size are sent as one block; larger ones part by part, without a copy."""


@dataclass(frozen=True)
class LinkAddress:
    """Where the writer listens, and what each side shows the other."""

    host: str
    port: int
    limit: int  # bytes of a message
    reader_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    writer_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)


class LinkWriter:
    """The writing end. It listens from the start, and lets its reader in at the first message."""

    def __init__(self, host: str, limit: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening: socket.socket | None = socket.create_server((host, 0), family=family, backlog=8)
        self.address = LinkAddress(host, self._listening.getsockname()[1], limit)
        self._socket: socket.socket | None = None
        self._closed = False

    def write(self, parts: Sequence[bytes | memoryview], timeout_s: float | None) -> None:
        """Send a message: a pickle, then its buffers (all flat bytes).

        Raises MessageTooLargeError; EdgeTimeoutError when the reader does not come or does not take it in time (the edge is
        closed then, as half a message may be on its way); EdgeClosedError.
        """
        blocks = _blocks(parts)
        size = sum(map(len, blocks)) - _PREFIX.size
        if size > self.address.limit:
            raise MessageTooLargeError(f"a message of {size} bytes does not fit an edge of {self.address.limit} bytes")
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        try:
            if self._socket is None:
                self._socket = self._let_reader_in(until)
            self._socket.settimeout(_left(until))
            for block in [b"".join(blocks)] if size <= _JOINED_BYTES else blocks:
                self._socket.sendall(block)
        except TimeoutError as late:
            self.close()
            raise EdgeTimeoutError("the reader on another host did not take a message in time") from late
        except OSError as error:
            raise EdgeClosedError(f"the reader on another host is gone: {error}") from error
        count_copied(size)

    def close(self) -> None:
        """End the link for both sides."""
        self._closed = True
        for end in (self._socket, self._listening):
            if end is not None:
                _shut(end)

    def _let_reader_in(self, until: float | None) -> socket.socket:
        """The connection of the first who shows the reader's secret."""
        while self._listening is not None and not self._closed:
            self._listening.settimeout(_left(until))
            found, _ = self._listening.accept()
            found.settimeout(_STRANGER_S)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hmac.compare_digest(_shown(found), self.address.reader_secret):
                found.sendall(self.address.writer_secret)
                self._listening.close()
                self._listening = None
                return found
            found.close()
        raise EdgeClosedError("this edge was closed")


class LinkReader:
    """The reading end. A read that timed out can be tried again: what has come of a message is kept."""

    def __init__(self, address: LinkAddress) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._poll = select.poll()
        self._closed = self._trusted = False
        self._shown = bytearray(SECRET_BYTES)
        self._prefix = bytearray(_PREFIX.size)
        self._body: Memory | None = None
        self._filled = 0  # of the first of these three that is not complete
        self._pool: list[Memory] = []
        self._patience = Patience()

    def read(self, timeout_s: float | None) -> object:
        """The next message, unpickled; its large arrays lie in memory that is used again once they are gone.

        Raises EdgeTimeoutError, EdgeClosedError.
        """
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        try:
            if self._socket is None:
                self._socket = self._connect()
            body = self._receive(self._socket, until)
        except OSError as error:
            raise EdgeClosedError(f"the writer on another host is gone: {error}") from error
        return _load(body)

    def close(self) -> None:
        """End the link for both sides."""
        self._closed = True
        if self._socket is not None:
            _shut(self._socket)

    def _connect(self) -> socket.socket:
        if self._closed:
            raise EdgeClosedError("this edge was closed")
        found = socket.create_connection((self._address.host, self._address.port), timeout=_LOOK_S * 10)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.sendall(self._address.reader_secret)
        found.setblocking(False)
        self._poll.register(found, select.POLLIN)
        return found

    def _receive(self, source: socket.socket, until: float | None) -> Memory:
        """The bytes of the next message."""
        if not self._trusted:
            self._fill(source, memoryview(self._shown), until)
            if not hmac.compare_digest(self._shown, self._address.writer_secret):
                self.close()
                raise EdgeClosedError("who listens where the writer of this edge should be does not know its secret")
            self._trusted = True
        if self._body is None:
            self._fill(source, memoryview(self._prefix), until)
            self._body = self._memory(_PREFIX.unpack(self._prefix)[0])
        self._fill(source, self._body.data, until)
        body, self._body = self._body, None
        return body

    def _fill(self, source: socket.socket, target: memoryview, until: float | None) -> None:
        while self._filled < len(target):
            self._wait(until)
            received = source.recv_into(target[self._filled :])
            if not received:
                raise EdgeClosedError("the writer on another host is gone, or closed the edge")
            self._filled += received
        self._filled = 0

    def _wait(self, until: float | None) -> None:
        """Return when there is something to receive: look for a while if the last came soon, then sleep."""
        started = now = time.perf_counter()
        while not self._poll.poll(0):
            if now - started < self._patience.seconds:
                let_others_run()
                now = self._patience.looked(now)
            else:
                self._sleep(_LOOK_S if until is None else until - time.perf_counter())
        self._patience.came(started)

    def _sleep(self, left: float) -> None:
        if self._closed:
            raise EdgeClosedError("this edge was closed")
        if left <= 0:
            self._patience.lose()
            raise EdgeTimeoutError("no message from another host in time")
        self._poll.poll(1000 * min(left, _LOOK_S))

    def _memory(self, size: int) -> Memory:
        """Room for a message: memory of an earlier one whose arrays are gone, or new."""
        if size > self._address.limit:
            raise EdgeClosedError(f"a message of {size} bytes came over an edge of {self._address.limit} bytes")
        if size <= _JOINED_BYTES:
            return np.empty(size, dtype=np.uint8)
        for known in self._pool:
            if (
                len(known) >= size and sys.getrefcount(known) == 3
            ):  # the pool, `known`, and the argument: no array lies in it
                return known[:size]
        self._pool = [known for known in self._pool if len(known) >= size][1 - POOL :]
        self._pool.append(np.empty(size, dtype=np.uint8))
        return self._pool[-1][:size]


def _blocks(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """A message as it is sent: its size, number and sizes of its parts, and the parts, each beginning on a cache line."""
    blocks: list[bytes | memoryview] = []
    for block in (struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts)), *parts):
        blocks += [block, bytes(aligned(len(block)) - len(block))]
    return [_PREFIX.pack(sum(map(len, blocks))), *blocks]


def _load(body: Memory) -> object:
    count = int(body[:8].view(np.uint64)[0])
    sizes = body[8 : 8 * (count + 1)].view(np.uint64).tolist()
    views = cut(body.data, aligned(8 * (count + 1)), sizes)
    return pickle.loads(views[0], buffers=views[1:])  # noqa: S301  # from a writer that showed the edge's secret


def _shown(stranger: socket.socket) -> bytes:
    """The secret that one who connected shows; less of it if no more comes."""
    shown = b""
    try:
        while len(shown) < SECRET_BYTES and (more := stranger.recv(SECRET_BYTES - len(shown))):
            shown += more
    except OSError:  # too late, or gone: not the reader
        return b""
    return shown


def _left(until: float | None) -> float | None:
    if until is None:
        return None
    left = until - time.perf_counter()
    if left <= 0:
        raise TimeoutError
    return left


def _shut(end: socket.socket) -> None:
    """Wake who waits on a socket, here and at its other end; its descriptor is closed when nobody refers to it."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more
        pass
