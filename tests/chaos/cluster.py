"""A Ray cluster over two hosts (`network.Hosts`): a head with the driver, and a raylet; started again if one is gone."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.network import INTERFACE, Hosts, Relay
from tests.integration.processes import alive, command_line

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
