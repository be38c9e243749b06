"""Links between ranks: their speeds, and which of them connect two hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second of one rank, per direction. The defaults are an H200's NVLink in a host and NDR between hosts."""

    in_host: float = 450e9
    between_hosts: float = 50e9

    def seconds(self, nbytes: int, crosses: bool) -> float:
        """Returns the duration of a message; `crosses`: from one host to another."""
        return nbytes / (self.between_hosts if crosses else self.in_host)


@dataclass(frozen=True)
class Placement:
    """The host of each channel rank. A byte is sent to each other host only once."""

    hosts: tuple[int, ...]

    def may_relay(self, sources: int) -> bool:
        """Whether a destination may relay to another: two are on one host, and not all ranks. The first `sources` send."""
        hosts = self.hosts[sources:]
        return len(set(self.hosts)) > 1 and len(set(hosts)) < len(hosts)

    def crosses(self, sender: int, receiver: int) -> bool:
        """Returns whether two ranks are on different hosts."""
        return self.hosts[sender] != self.hosts[receiver]
