"""An edge between two hosts: one TCP connection, from the process that writes to the one that reads.

Ray's own channels between hosts poll on both sides and go through two raylets and the object store. Here the writer listens,
the reader connects when it first reads, and a message is one send of its parts, laid out as in a ring's slot, so that
arrays are received once and then used in place.

A write does not wait for the reader: two workers that each write to the other before they read, as the stages of a pipeline
do, would wait for each other. What the socket takes at once is sent at once. The rest is copied, and sent by a thread that
ends with it: the writer may compute for a long time, or wait in shared memory, where nobody would send it otherwise.

Neither side unpickles anything, nor sends any message, before the other has shown the secret that was made for this edge
and came through Ray, whose connections are authenticated; the listening socket is closed once its reader has come. As Ray's
own transfers, messages are not encrypted.

A link that ends though nobody here closed it is *lost*, which is an error that names both ends (`EdgeLostError`).
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dagrl.executors.futex import Patience, let_others_run
from dagrl.executors.memory import (
    EdgeClosedError,
    EdgeLostError,
    EdgeTimeoutError,
    MessageTooLargeError,
    aligned,
    count_copied,
    cut,
)
from dagrl.executors.pickling import load

Memory = npt.NDArray[np.uint8]

SECRET_BYTES = 32
_PREFIX = struct.Struct("<Q")  # bytes of the message that follows
_LOOK_S = 0.5  # how long to wait at most before looking whether this side was closed
POOL = 4
"""Memories of large messages that a reader remembers to use again; what it has forgotten ends with its last array."""

_STRANGER_S = 2.0  # how long one who connects may take to show the secret
_JOINED_BYTES = 64 << 10
"""Messages up to this size are sent as one block; larger ones part by part, without a copy of what the socket takes."""

_MOST_BLOCKS = 512
"""Blocks given to the socket at once; Linux takes at most 1024 (IOV_MAX)."""

_SILENCE_S, _PROBE_S, _PROBES = 30, 6, 5
"""Both ends ask after each other when nothing came for so long, then so often. A host that is gone is noticed in 60 s."""


@dataclass(frozen=True)
class LinkAddress:
    """Where the writer listens, and what each side shows the other."""

    host: str
    port: int
    limit: int  # bytes of a message
    reader_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    writer_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)


class LinkWriter:
    """The writing end, of which `in_flight` messages can be unsent. It listens from the start; its reader may come late."""

    def __init__(self, host: str, limit: int, in_flight: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening: socket.socket | None = socket.create_server((host, 0), family=family, backlog=8)
        self.address = LinkAddress(host, self._listening.getsockname()[1], limit)
        self.lost: EdgeLostError | None = None
        self._in_flight = in_flight
        self._socket: socket.socket | None = None
        self._reader = "a reader that has not come"
        self._closed = False
        self._turn = threading.Condition()
        self._unsent: deque[bytes] = deque()  # what is left of messages; while there is any, a thread sends it

    def write(self, parts: Sequence[bytes | memoryview], timeout_s: float | None) -> None:
        """Send a message: a pickle, then its buffers (all flat bytes), which may be changed afterwards.

        Waits only while `in_flight` messages are unsent. Raises MessageTooLargeError; EdgeTimeoutError when that takes too
        long (nothing of the message is sent then); EdgeClosedError, of which EdgeLostError says that the reader is gone.
        """
        blocks = _blocks(parts)
        size = sum(map(len, blocks)) - _PREFIX.size
        if size > self.address.limit:
            raise MessageTooLargeError(f"a message of {size} bytes does not fit an edge of {self.address.limit} bytes")
        if size <= _JOINED_BYTES:
            blocks = [b"".join(blocks)]
        with self._turn:
            if self._closed or len(self._unsent) >= self._in_flight:
                self._wait_for_room(timeout_s)
            if self._socket is not None and not self._unsent:
                blocks = self._send_at_once(self._socket, blocks)
            if blocks:
                self._send_later(blocks)
        count_copied(size)

    def close(self) -> None:
        """End the link for both sides; what is unsent is dropped."""
        with self._turn:
            self._closed = True
            for end in (self._socket, self._listening):
                if end is not None:
                    _shut(end)
            self._turn.notify_all()

    def _wait_for_room(self, timeout_s: float | None) -> None:
        if not self._turn.wait_for(lambda: self._closed or len(self._unsent) < self._in_flight, timeout_s):
            raise EdgeTimeoutError(f"{self._reader} on another host did not take the messages before this one in time")
        if self._closed:
            raise EdgeClosedError("this edge was closed") if self.lost is None else EdgeLostError(str(self.lost))

    def _send_at_once(self, reader: socket.socket, blocks: list[bytes | memoryview]) -> list[bytes | memoryview]:
        try:
            return _send(reader, blocks)
        except OSError as error:
            raise self._end(error) from error

    def _send_later(self, blocks: Sequence[bytes | memoryview]) -> None:
        self._unsent.append(b"".join(blocks))
        count_copied(len(self._unsent[-1]))
        if len(self._unsent) == 1:
            threading.Thread(target=self._send_unsent, name="dagrl-link", daemon=True).start()

    def _send_unsent(self) -> None:
        """Send until nothing is left; runs in a thread of its own."""
        try:
            reader = self._socket or self._let_reader_in()
            while self._unsent:
                _send_all(reader, [self._unsent[0]])
                with self._turn:
                    self._unsent.popleft()
                    self._turn.notify_all()
                    if not self._unsent:  # looked at under the lock: the next write starts another thread
                        return
        except (OSError, EdgeClosedError) as error:
            with self._turn:
                self._end(error)
                self._unsent.clear()
                self._turn.notify_all()

    def _end(self, error: Exception) -> EdgeClosedError:
        """What an error of the socket means: that the link is lost, if it was not closed here."""
        if self._closed:
            return EdgeClosedError("this edge was closed")
        self.lost = EdgeLostError(f"lost the link to another host, from {_name(self.address)} to {self._reader}: {error}")
        self.close()
        return self.lost

    def _let_reader_in(self) -> socket.socket:
        """The connection of the first who shows the reader's secret."""
        while self._listening is not None and not self._closed:
            found, peer = self._listening.accept()
            found.settimeout(_STRANGER_S)
            _keep_alive(found)
            if hmac.compare_digest(_shown(found), self.address.reader_secret):
                found.sendall(self.address.writer_secret)
                found.settimeout(None)
                return self._use(found, f"{peer[0]}:{peer[1]}")
            found.close()
        raise EdgeClosedError("this edge was closed")

    def _use(self, found: socket.socket, reader: str) -> socket.socket:
        with self._turn:
            if self._closed:
                _shut(found)
                raise EdgeClosedError("this edge was closed")
            assert self._listening is not None
            self._listening.close()
            self._listening, self._socket, self._reader = None, found, reader
        return found


class LinkReader:
    """The reading end. A read that timed out can be tried again: what has come of a message is kept."""

    def __init__(self, address: LinkAddress) -> None:
        self.lost: EdgeLostError | None = None
        self._address = address
        self._name = "a reader that has not connected"
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

        Raises EdgeTimeoutError; EdgeClosedError, of which EdgeLostError says that the writer is gone; UnreadableError, and
        the message counts as read.
        """
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        try:
            if self._socket is None:
                self._socket = self._connect()
            body = self._receive(self._socket, until)
        except OSError as error:
            raise self._end(error) from error
        return _load(body)

    def close(self) -> None:
        """End the link for both sides."""
        self._closed = True
        if self._socket is not None:
            _shut(self._socket)

    def _end(self, error: object) -> EdgeClosedError:
        """What an error of the socket means: that the link is lost, if it was not closed here."""
        if self._closed:
            return EdgeClosedError("this edge was closed")
        self.lost = EdgeLostError(f"lost the link from another host, from {_name(self._address)} to {self._name}: {error}")
        self.close()
        return self.lost

    def _connect(self) -> socket.socket:
        if self._closed:
            raise EdgeClosedError("this edge was closed")
        found = socket.create_connection((self._address.host, self._address.port), timeout=_LOOK_S * 10)
        self._name = "{}:{}".format(*found.getsockname())
        _keep_alive(found)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_SILENCE_S + _PROBE_S * _PROBES))
        found.sendall(self._address.reader_secret)
        found.setblocking(False)
        self._poll.register(found, select.POLLIN)
        return found

    def _receive(self, source: socket.socket, until: float | None) -> Memory:
        """The bytes of the next message."""
        if not self._trusted:
            self._fill(source, memoryview(self._shown), until)
            if not hmac.compare_digest(self._shown, self._address.writer_secret):
                raise self._end("who listens where its writer should be does not know its secret")
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
                raise ConnectionAbortedError("its writer closed it, or is gone")
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
            raise self._end(f"a message of {size} bytes came over an edge of {self._address.limit} bytes")
        if size <= _JOINED_BYTES:
            return np.empty(size, dtype=np.uint8)
        for known in self._pool:
            unused = sys.getrefcount(known) == 3  # the pool, `known`, and the argument: no array lies in it
            if unused and len(known) >= size:
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
    return load(views[0], views[1:])  # from a writer that showed the edge's secret


def _shown(stranger: socket.socket) -> bytes:
    """The secret that one who connected shows; less of it if no more comes in time."""
    shown, until = b"", time.monotonic() + _STRANGER_S
    try:
        while len(shown) < SECRET_BYTES and (left := until - time.monotonic()) > 0:
            stranger.settimeout(left)
            more = stranger.recv(SECRET_BYTES - len(shown))
            if not more:
                break
            shown += more
    except OSError:  # too late, or gone: not the reader
        return b""
    return shown


def _after(blocks: list[bytes | memoryview], sent: int) -> list[bytes | memoryview]:
    """What is left of blocks of which so many bytes were sent."""
    for place, block in enumerate(blocks):
        if sent < len(block):
            return [memoryview(block)[sent:], *blocks[place + 1 :]]
        sent -= len(block)
    return []


def _send_all(reader: socket.socket, blocks: list[bytes | memoryview]) -> None:
    """Send blocks, however long that takes. Raises OSError, also when the reader closes its end with its buffers full.

    `sendall` would wait on then: nothing goes back and forth that would tell.
    """
    poll = select.poll()
    poll.register(reader, select.POLLOUT | select.POLLRDHUP)
    while blocks:
        ((_, event),) = poll.poll()
        if event & select.POLLRDHUP:
            raise ConnectionAbortedError("its reader closed it, or is gone")
        blocks = _send(reader, blocks)


def _send(reader: socket.socket, blocks: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Send what the socket has room for; gives what is left."""
    try:
        while blocks:
            sent = reader.sendmsg(blocks[:_MOST_BLOCKS], (), socket.MSG_DONTWAIT)
            blocks = _after(blocks, sent)
    except BlockingIOError:  # no room
        pass
    return blocks


def _keep_alive(end: socket.socket) -> None:
    """Send small messages at once, and end the connection where the other host answers no more.

    Where what was sent stays without an answer, the system does not ask: then the reader notices, who sends nothing. The
    writer has no TCP_USER_TIMEOUT, as that also ends a connection whose reader lives and only does not read yet (tcp(7)).
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _name(address: LinkAddress) -> str:
    return f"{address.host}:{address.port}"


def _shut(end: socket.socket) -> None:
    """Wake who waits on a socket, here and at its other end; its descriptor is closed when nobody refers to it."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more
        pass
