"""The channel suite over NCCL; needs two GPUs and cupy. A dead peer is noticed only at the deadline."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.channel_cases import Kind, Place, run_case
from tests.channel_suite import ChannelSuite

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")


SLOW_CYCLES = 200_000_000  # GPU cycles: a tenth of a second


def in_stream_order(place: Place) -> object:
    """Nothing waits on the host: a message is sent after the slow kernel that writes it, and read by the next kernel.

    What the receiver saw, or on the sender whether the host was ahead of its GPU.
    """
    channel = place.open()
    message = torch.zeros(1 << 22, device=place.device)
    seen, ahead = [], False
    for number in range(1, 7):
        if place.rank == 0:
            torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
            message.fill_(number)
            channel.send(message, 1).wait()
            message.fill_(-1)  # not before it is sent
            ahead = ahead or not torch.cuda.current_stream().query()
        else:
            channel.receive(message, 0).wait()
            seen.append(message.clone())
            torch.cuda._sleep(SLOW_CYCLES // 4)  # type: ignore[no-untyped-call]
            message.fill_(-2)
    channel.synchronize()
    channel.close()
    return [sorted(set(copy.tolist())) for copy in seen] if place.rank else ahead


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_messages_keep_the_order_of_streams() -> None:
    ahead, seen = run_case(in_stream_order, "nccl", 2)
    assert ahead is True and seen == [[float(number)] for number in range(1, 7)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestNccl(ChannelSuite):
    kind: ClassVar[Kind] = "nccl"
    ranks: ClassVar[int] = 2
    notices_death: ClassVar[bool] = False
