"""Handshake: before sending weights, each pair of ranks checks that both have the same plan, version and verify mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagrl.channels.base import Channel, wait_all
from dagrl.errors import ChannelError

if TYPE_CHECKING:
    import torch


class Handshake:
    """Sends `[3]` int64 from each sender to each of its receivers: the plan's digest, the version, a number of its own.

    `senders` are the ranks that send to this one, `receivers` those that it sends to. Memory is allocated once, on GPUs with
    a pinned copy on the host, so that a check costs one short message.
    """

    def __init__(
        self, channel: Channel, digest: int, senders: Sequence[int], receivers: Sequence[int], device: torch.device | None
    ) -> None:
        import torch

        pinned = device is not None and device.type == "cuda"
        self._channel, self._digest = channel, digest
        self._senders, self._receivers = senders, receivers
        self._told = torch.zeros(3, dtype=torch.int64, pin_memory=pinned)
        self._read = torch.zeros(len(senders), 3, dtype=torch.int64, pin_memory=pinned)
        self._mine = torch.zeros(3, dtype=torch.int64, device=device)
        self._theirs = torch.zeros(len(senders), 3, dtype=torch.int64, device=device)

    def post(self, version: int, number: int = 0) -> None:
        """Sends this rank's header and receives the others'."""
        if not self._senders and not self._receivers:
            return
        self._told[0], self._told[1], self._told[2] = self._digest, version, number
        self._mine.copy_(self._told, non_blocking=True)
        sends = [(self._mine, peer) for peer in self._receivers]
        wait_all(self._channel.exchange(sends, list(zip(self._theirs, self._senders, strict=True))))
        self._read.copy_(self._theirs, non_blocking=True)

    def check(self, version: int) -> dict[int, int]:
        """Returns the number of each sender, when all of them have announced this plan and `version`.

        Otherwise raises ChannelError that names the sender, and breaks the channel, as peers wait for messages.
        """
        if not self._senders:
            return {}
        self._channel.synchronize()
        for (digest, sent, _), peer in zip(self._read.tolist(), self._senders, strict=True):
            if digest != self._digest:
                raise self._broken(
                    f"rank {peer} has another refit plan, refit.verify or refit.delta; give every rank its part of one plan"
                )
            if sent != version:
                raise self._broken(
                    f"rank {peer} sends version {sent}, but this rank receives version {version}; "
                    "replay one version on all ranks"
                )
        return dict(zip(self._senders, self._read[:, 2].tolist(), strict=True))

    def _broken(self, found: str) -> ChannelError:
        self._channel.abort(found)
        return ChannelError(found)
