"""Two hosts on one machine: network namespaces joined by a relay that can lose, delay, reorder and corrupt their packets.

The relay is a process that carries frames from one pair of virtual Ethernet devices to another (packet(7)). It needs nothing
of the kernel's queueing disciplines (tc-netem(8)), which many kernels lack. A Ray cluster is over both hosts: a head with
the driver, and a raylet; started again if one is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tests.integration.processes import alive, command_line

NETWORK, INTERFACE = "10.78.0", "fabric0"
SIOCETHTOOL, STXCSUM, STSO, SGSO = 0x8946, 0x17, 0x1F, 0x24  # linux/ethtool.h
ETH_P_ALL = 3
LONGEST_FRAME = 1 << 16
HOWS = ("loss", "delay_s", "reorder", "corrupt")


class Hosts:
    """Two network namespaces and the relay between them."""

    def __init__(self) -> None:
        own = secrets.token_hex(3)  # pids repeat between namespaces of processes, which share the devices
        self.names = [f"chaos-{own}-{number}" for number in range(2)]
        self.addresses = [f"{NETWORK}.{number}" for number in (1, 2)]
        ends = [f"relay-{own}-{number}" for number in range(2)]
        for name, address, end in zip(self.names, self.addresses, ends, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", end, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("link", "set", end, "up", "promisc", "on")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _in_namespace(name, _without_offload, INTERFACE)
        self.relay = Relay(ends)

    def close(self) -> None:
        self.relay.close()
        for name in self.names:
            _ip("netns", "del", name)


class Relay:
    """A process that carries frames between two devices, and disturbs them on request."""

    def __init__(self, devices: list[str]) -> None:
        context = get_context("fork")
        self._how: Mapping[str, Synchronized[float]] = {name: context.Value(ctypes.c_double, 0.0) for name in HOWS}
        self._process = context.Process(target=_carry, args=(devices, self._how), daemon=True)
        self._process.start()

    @contextmanager
    def disturbed(self, **how: float) -> Iterator[None]:
        """Shares of packets that are lost, reordered or corrupted, and seconds that those not reordered are late."""
        for name, value in how.items():
            self._how[name].value = value
        try:
            yield
        finally:
            for name in how:
                self._how[name].value = 0.0

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _carry(devices: list[str], how: Mapping[str, Synchronized[float]]) -> None:
    """Carries frames both ways. Frames that are late wait in a heap."""
    ends = [_open(device) for device in devices]
    other = {ends[0].fileno(): ends[1], ends[1].fileno(): ends[0]}
    waiting: list[tuple[float, int, bytes, socket.socket]] = []
    chance, number = random.Random(0), 0  # noqa: S311
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], patience)[0]:
            frame, address = end.recvfrom(LONGEST_FRAME)
            if address[2] == socket.PACKET_OUTGOING or chance.random() < how["loss"].value:
                continue
            number += 1
            late = 0.0 if chance.random() < how["reorder"].value else how["delay_s"].value
            due = time.monotonic() + late if late else 0.0
            heapq.heappush(waiting, (due, number, _changed(frame, how["corrupt"].value, chance), other[end.fileno()]))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, frame, end = heapq.heappop(waiting)
            end.send(frame)


def _changed(frame: bytes, share: float, chance: random.Random) -> bytes:
    """Returns the frame, or the frame with a flipped bit behind its Ethernet header."""
    if len(frame) < 20 or chance.random() >= share:
        return frame
    at = chance.randrange(14, len(frame))
    return frame[:at] + bytes([frame[at] ^ (1 << chance.randrange(8))]) + frame[at + 1 :]


def _open(device: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.bind((device, 0))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    return end


def _without_offload(device: str) -> None:
    """Makes the kernel compute checksums and cut segments itself: a relay carries frames as a cable does (ethtool -K)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (STXCSUM, STSO, SGSO):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP8x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, SIOCETHTOOL, request)


def _in_namespace(name: str, function: object, *arguments: object) -> None:
    """Calls a function in a network namespace, in a process of its own."""
    process = get_context("fork").Process(target=_enter_and_call, args=(name, function, arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{function} failed in {name}")


def _enter_and_call(name: str, function: object, arguments: tuple[object, ...]) -> None:
    CLONE_NEWNET = 0x40000000
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    function(*arguments)  # type: ignore[operator]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


PORT = 6399
START = (str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats")
JOINED_S = 60.0


class Cluster:
    """Two raylets, one CPU and one place for a worker each."""

    def __init__(self, second: Mapping[str, str]) -> None:
        """`second` is an environment of the second host alone."""
        self._second = second
        self._hosts = Hosts()
        self.relay: Relay = self._hosts.relay
        self._temporary = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets are in it
        self._environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "RAY_TMPDIR": self._temporary,
        }
        self._raylets: list[subprocess.Popen[bytes] | None] = [None, None]

    def ready(self) -> tuple[list[str], tuple[str, ...], Mapping[str, str]]:
        """Starts what does not run. Returns the prefix, the overrides and the environment of the command."""
        if any(raylet is None or raylet.poll() is not None for raylet in self._raylets):
            self._stop()
            self._start()
        head = self._hosts.addresses[0]
        prefix = ["ip", "netns", "exec", self._hosts.names[0]]
        return prefix, (f"cluster.address={head}:{PORT}",), self._environment

    def keep(self) -> None:
        """Starts the raylet of the second host again if it has ended, as an operator does."""
        if self._raylets[1] is not None and self._raylets[1].poll() is not None:
            self._start_raylet(1)

    def pids(self) -> list[int]:
        return [pid for name in self._hosts.names for pid in _pids(name)]

    def close(self) -> None:
        self._stop()
        self._hosts.close()

    def _start(self) -> None:
        for place in range(len(self._raylets)):
            self._start_raylet(place)
            self._wait_for_raylet(place)

    def _start_raylet(self, place: int) -> None:
        head, address = self._hosts.addresses[0], self._hosts.addresses[place]
        role = ["--head", f"--port={PORT}", "--include-dashboard=false"] if not place else [f"--address={head}:{PORT}"]
        size = ["--num-cpus=1", "--num-gpus=1", "--object-store-memory=100000000"]
        self._raylets[place] = subprocess.Popen(
            ["ip", "netns", "exec", self._hosts.names[place], *START, f"--node-ip-address={address}", *role, *size],
            env={**os.environ, **self._environment, **(self._second if place else {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _wait_for_raylet(self, place: int) -> None:
        until = time.monotonic() + JOINED_S
        while not any("raylet/raylet" in command_line(pid) for pid in _pids(self._hosts.names[place])):
            raylet = self._raylets[place]
            assert raylet is not None
            if raylet.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"`ray start` on host {place} did not start a raylet")
            time.sleep(0.2)
        time.sleep(2.0)  # it joins

    def _stop(self) -> None:
        for pid in self.pids():
            if "main_job" not in command_line(pid) and alive(pid):
                os.kill(pid, 9)
        for raylet in self._raylets:
            if raylet is not None:
                raylet.wait()
        self._raylets = [None, None]


def _pids(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]
