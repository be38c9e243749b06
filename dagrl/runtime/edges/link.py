"""An edge between two hosts: one TCP connection from the writing process to the reading one.

Ray's own channels between hosts poll on both sides and pass through two raylets and the object store. Here the writer
listens and the reader connects when it first reads. A message is one send of its parts, in the layout of a ring's slot, so
arrays are received once and used in place.

A write does not wait for the reader. Otherwise two workers that each write to the other before they read, such as the stages
of a pipeline, would deadlock. What the socket accepts is sent at once. The rest is copied and sent by a thread, because the
writer may compute for a long time, or wait in shared memory, before its next call.

Neither side unpickles or sends a message before the other has shown the secret that was made for this edge and came through
Ray, whose connections are authenticated. The listening socket is closed once its reader has connected. Messages are not
encrypted.

A link that ends although this process did not close it is *lost*: EdgeLostError, which names both ends.
"""

import hmac
import math
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dagrl.runtime.edges.futex import Patience, let_others_run
from dagrl.runtime.edges.memory import EdgeClosedError, EdgeLostError, EdgeTimeoutError, MessageTooLargeError, aligned, cut
from dagrl.runtime.edges.pickling import load

Memory = npt.NDArray[np.uint8]

SECRET_BYTES = 32
_PREFIX = struct.Struct("<QI")  # bytes of the message that follows, and the CRC-32 of its sizes and its pickle
_LOOK_S = 0.5  # longest wait before the next look at the closed flag
POOL = 4
"""Buffers of large messages that a reader keeps for reuse. Any other buffer ends with its last array."""

_STRANGER_S = 2.0  # how long a connecting process may take to show the secret
_JOINED_BYTES = 64 << 10
"""Messages up to this size are sent as one block. Larger ones are sent part by part, without copying what the socket
accepts.
"""

_MOST_BLOCKS = 512
"""Blocks given to the socket at once. Linux accepts at most 1024 (IOV_MAX)."""

_SILENCE_S, _PROBE_S, _PROBES = 30, 6, 5
"""TCP keep-alive: seconds of silence before the first probe, between probes, number of probes. A dead host shows in 60 s."""


@dataclass(frozen=True)
class LinkAddress:
    """The address at which the writer listens, and the secret that each side shows the other."""

    host: str
    port: int
    limit: int  # bytes of a message
    reader_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    writer_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LinkWriter:
    """The writing end. Up to `in_flight` messages can be unsent. It listens from the start; its reader may connect later."""

    def __init__(self, host: str, limit: int, in_flight: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening: socket.socket | None = socket.create_server((host, 0), family=family, backlog=8)
        self.address = LinkAddress(host, self._listening.getsockname()[1], limit)
        self.lost: EdgeLostError | None = None
        self._in_flight = in_flight
        self._socket: socket.socket | None = None
        self._reader = "an unconnected reader"
        self._closed = False
        self._turn = threading.Condition()
        self._unsent: deque[bytes] = deque()  # unsent parts of messages; a thread sends them while there are any

    def write(self, parts: Sequence[bytes | memoryview], timeout_s: float | None) -> None:
        """Sends a message: a pickle and its buffers, as flat bytes. The caller may change the buffers afterwards.

        Waits only while `in_flight` messages are unsent. Raises MessageTooLargeError; EdgeTimeoutError if the wait takes too
        long (nothing of the message is sent then); EdgeClosedError, or EdgeLostError if the reader is gone.
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
                try:
                    blocks = _send(self._socket, blocks)
                except OSError as error:
                    raise self._end(error) from error
            if blocks:
                self._unsent.append(b"".join(blocks))
                if len(self._unsent) == 1:
                    threading.Thread(target=self._send_unsent, name="dagrl-link", daemon=True).start()

    def close(self) -> None:
        """Closes the link for both sides. Drops unsent messages."""
        with self._turn:
            self._closed = True
            for end in (self._socket, self._listening):
                if end is not None:
                    _shut(end)
            self._turn.notify_all()

    def _wait_for_room(self, timeout_s: float | None) -> None:
        if not self._turn.wait_for(lambda: self._closed or len(self._unsent) < self._in_flight, timeout_s):
            raise EdgeTimeoutError(f"{self._reader} on another host did not receive the earlier messages in time")
        if self._closed:
            raise EdgeClosedError("this edge was closed") if self.lost is None else EdgeLostError(str(self.lost))

    def _send_unsent(self) -> None:
        """Sends until nothing is left. Runs in its own thread."""
        try:
            reader = self._socket or self._let_reader_in()
            while self._unsent:
                _send_all(reader, [self._unsent[0]])
                with self._turn:
                    self._unsent.popleft()
                    self._turn.notify_all()
                    if not self._unsent:  # checked under the lock: the next write starts another thread
                        return
        except (OSError, EdgeClosedError) as error:
            with self._turn:
                self._end(error)
                self._unsent.clear()
                self._turn.notify_all()

    def _end(self, error: Exception) -> EdgeClosedError:
        """Translates a socket error: the link is lost, unless it was closed here."""
        if self._closed:
            return EdgeClosedError("this edge was closed")
        self.lost = EdgeLostError(f"lost the link to another host, from {self.address} to {self._reader}: {error}")
        self.close()
        return self.lost

    def _let_reader_in(self) -> socket.socket:
        """Returns the first connection that shows the reader's secret."""
        while self._listening is not None and not self._closed:
            accepted, peer = self._listening.accept()
            accepted.settimeout(_STRANGER_S)
            _keep_alive(accepted)
            if hmac.compare_digest(_shown(accepted), self.address.reader_secret):
                accepted.sendall(self.address.writer_secret)
                accepted.settimeout(None)
                return self._use(accepted, f"{peer[0]}:{peer[1]}")
            accepted.close()
        raise EdgeClosedError("this edge was closed")

    def _use(self, connection: socket.socket, reader: str) -> socket.socket:
        with self._turn:
            if self._closed:
                _shut(connection)
                raise EdgeClosedError("this edge was closed")
            assert self._listening is not None
            self._listening.close()
            self._listening, self._socket, self._reader = None, connection, reader
            self._turn.notify_all()
        return connection


class LinkReader:
    """The reading end. A read that timed out can be repeated: the received part of a message is kept."""

    def __init__(self, address: LinkAddress) -> None:
        self.lost: EdgeLostError | None = None
        self._address = address
        self._name = "an unconnected reader"
        self._socket: socket.socket | None = None
        self._poll = select.poll()
        self._closed = self._trusted = False
        self._shown = bytearray(SECRET_BYTES)
        self._prefix = bytearray(_PREFIX.size)
        self._body: Memory | None = None
        self._sum = 0
        self._filled = 0  # bytes received of the first of these three that is incomplete
        self._pool: list[Memory] = []
        self._patience = Patience()

    def read(self, timeout_s: float | None) -> object:
        """Returns the next message, unpickled. Its large arrays are in buffers that are reused once the arrays are gone.

        Raises EdgeTimeoutError; EdgeClosedError, or EdgeLostError if the writer is gone; UnreadableError.
        """
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        try:
            if self._socket is None:
                self._socket = self._connect()
            views = _views(self._receive(self._socket, until), self._sum)
        except OSError as error:
            raise self._end(error) from error
        return load(views[0], views[1:])  # from a writer that showed the edge's secret

    def close(self) -> None:
        """Closes the link for both sides."""
        self._closed = True
        if self._socket is not None:
            _shut(self._socket)

    def _end(self, error: object) -> EdgeClosedError:
        """Translates a socket error: the link is lost, unless it was closed here."""
        if self._closed:
            return EdgeClosedError("this edge was closed")
        self.lost = EdgeLostError(f"lost the link from another host, from {self._address} to {self._name}: {error}")
        self.close()
        return self.lost

    def _connect(self) -> socket.socket:
        if self._closed:
            raise EdgeClosedError("this edge was closed")
        connection = socket.create_connection((self._address.host, self._address.port), timeout=_LOOK_S * 10)
        self._name = "{}:{}".format(*connection.getsockname())
        _keep_alive(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_SILENCE_S + _PROBE_S * _PROBES))
        connection.sendall(self._address.reader_secret)
        connection.setblocking(False)
        self._poll.register(connection, select.POLLIN)
        return connection

    def _receive(self, source: socket.socket, until: float | None) -> Memory:
        if not self._trusted:
            self._fill(source, memoryview(self._shown), until)
            if not hmac.compare_digest(self._shown, self._address.writer_secret):
                raise self._end("the process that listens at the writer's address does not know its secret")
            self._trusted = True
        if self._body is None:
            self._fill(source, memoryview(self._prefix), until)
            size, self._sum = _PREFIX.unpack(self._prefix)
            self._body = self._memory(size)
        self._fill(source, self._body.data, until)
        body, self._body = self._body, None
        return body

    def _fill(self, source: socket.socket, target: memoryview, until: float | None) -> None:
        while self._filled < len(target):
            self._wait(until)
            received = source.recv_into(target[self._filled :])
            if not received:
                raise ConnectionAbortedError("the writer closed it or is gone")
            self._filled += received
        self._filled = 0

    def _wait(self, until: float | None) -> None:
        """Returns once there is something to receive. Spins if the last message came soon, then sleeps."""
        started = now = time.perf_counter()
        spin_until = min(started + self._patience.seconds, math.inf if until is None else until)
        while not self._poll.poll(0):
            if now < spin_until:
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
        """Returns a buffer for a message: that of an earlier one whose arrays are gone, or a new one."""
        if size > self._address.limit:
            raise self._end(f"a message of {size} bytes came over an edge of {self._address.limit} bytes")
        if size <= _JOINED_BYTES:
            return np.empty(size, dtype=np.uint8)
        for known in self._pool:
            unused = sys.getrefcount(known) == 3  # the pool, `known` and the argument: no array uses it
            if unused and len(known) >= size:
                return known[:size]
        self._pool = [known for known in self._pool if len(known) >= size][1 - POOL :]
        self._pool.append(np.empty(size, dtype=np.uint8))
        return self._pool[-1][:size]


def _blocks(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Returns a message as it is sent: its size, the number and sizes of its parts, and the parts, each on a cache line."""
    table = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    blocks: list[bytes | memoryview] = []
    for block in (table, *parts):
        blocks += [block, bytes(aligned(len(block)) - len(block))]
    return [_PREFIX.pack(sum(map(len, blocks)), _sum_of(table, parts[0])), *blocks]


def _views(body: Memory, expected: int) -> list[memoryview]:
    """Returns the parts of a message: the pickle, then its buffers. Raises OSError if the bytes are no message.

    A pickle with one changed bit can take all memory, or minutes; TCP's own sums of 16 bits miss one change in 65,536.
    """
    count = int(body[:8].view(np.uint64)[0]) if len(body) >= 8 else 0
    if 0 < count < len(body) // 8:
        table = body[: 8 * (count + 1)]
        sizes: list[int] = table[8:].view(np.uint64).tolist()
        if aligned(len(table)) + sum(map(aligned, sizes)) == len(body):
            views = cut(body.data, aligned(len(table)), sizes)
            if _sum_of(table.data, views[0]) == expected:
                return views
    raise ConnectionAbortedError(f"a message of {len(body)} bytes is not what was sent; its bytes were changed on the way")


def _sum_of(table: bytes | memoryview, pickled: bytes | memoryview) -> int:
    return crc32(pickled, crc32(table))


def _shown(stranger: socket.socket) -> bytes:
    """Returns the secret that a connecting process shows; or the part of it that came in time."""
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
    """Returns what is left of `blocks` after `sent` bytes."""
    for place, block in enumerate(blocks):
        if sent < len(block):
            return [memoryview(block)[sent:], *blocks[place + 1 :]]
        sent -= len(block)
    return []


def _send_all(reader: socket.socket, blocks: list[bytes | memoryview]) -> None:
    """Sends all blocks, however long it takes. Raises OSError, also if the reader closes its end while its buffers are full.

    `sendall` would block forever then, because no more packets are exchanged that could tell.
    """
    poll = select.poll()
    poll.register(reader, select.POLLOUT | select.POLLRDHUP)
    while blocks:
        ((_, event),) = poll.poll()
        if event & select.POLLRDHUP:
            raise ConnectionAbortedError("the reader closed it or is gone")
        blocks = _send(reader, blocks)


def _send(reader: socket.socket, blocks: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Sends what the socket has room for and returns the rest."""
    try:
        while blocks:
            blocks = _after(blocks, reader.sendmsg(blocks[:_MOST_BLOCKS], (), socket.MSG_DONTWAIT))
    except BlockingIOError:  # no room
        pass
    return blocks


def _keep_alive(end: socket.socket) -> None:
    """Disables Nagle's algorithm, and ends the connection if the other host stops answering.

    The system sends no probes while sent data is unacknowledged. In that case the reader, which sends nothing, notices. The
    writer has no TCP_USER_TIMEOUT, because that would also end a connection whose reader is alive but does not read yet
    (tcp(7)).
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _shut(end: socket.socket) -> None:
    """Wakes all threads that wait on a socket, here and at its other end. The descriptor closes with its last reference."""
    with suppress(OSError):  # not connected any more
        end.shutdown(socket.SHUT_RDWR)
