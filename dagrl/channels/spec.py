"""The address of a channel, and the store that joins its ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from dagrl.errors import ChannelError
from dagrl.runtime.store import open_tcp_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

ChannelKind = Literal["gloo", "nccl", "ipc"]


@dataclass(frozen=True)
class ChannelSpec:
    """One rank's end of a channel. `address` is a free `host:port` on the host of rank 0, which serves the rendezvous there.

    `timeout_s` limits the opening and every wait, in seconds. Raises ChannelError for a malformed address or rank.
    """

    kind: ChannelKind
    address: str
    rank: int
    size: int
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ChannelError(f"the channel address is {self.address!r}; expected host:port")
        if not 0 <= self.rank < self.size:
            raise ChannelError(f"the channel rank is {self.rank}; expected 0 to {self.size - 1}")

    def __str__(self) -> str:
        """Returns this rank's end as errors name it."""
        return f"{self.kind} channel rank {self.rank} of {self.size} ({self.address})"

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)


def open_store(spec: ChannelSpec) -> Store:
    """Opens the channel's store, which rank 0 serves; returns when all ranks are connected. Raises ChannelError."""
    host, _, port = spec.address.rpartition(":")
    try:
        return open_tcp_store(host, int(port), spec.size, serves=spec.rank == 0, timeout=spec.timeout)
    except RuntimeError as error:  # torch's DistError is one
        raise cannot_join(spec, error) from error


def cannot_join(spec: ChannelSpec, error: Exception) -> ChannelError:
    """Returns the error of a rank that could not open its end."""
    return ChannelError(
        f"{spec.kind} channel at {spec.address}: rank {spec.rank} of {spec.size} could not join within {spec.timeout_s} s: "
        f"{error}; every rank must open its end, and the address must be free on the host of rank 0"
    )


def nccl_environment() -> dict[str, str]:
    """Returns the environment variables that must be set before a process first captures NCCL's operations in a CUDA graph.

    Without them NCCL registers the memory of captured operations with peers. That waits for the peers on the host, and peers
    keep writing to the address after the memory was freed and the address was reused.
    """
    return {"NCCL_GRAPH_REGISTER": os.environ.get("NCCL_GRAPH_REGISTER", "0")}
