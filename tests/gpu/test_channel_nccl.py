"""The channel suite between two GPUs, over NCCL, where a dead peer is noticed only at the deadline, and IPC; needs cupy."""

from typing import ClassVar

import pytest
import torch

from tests.channel_cases import Kind, Place, run_case
from tests.integration.test_channel_gloo import ChannelSuite

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


def test_messages_keep_the_order_of_streams() -> None:
    ahead, seen = run_case(in_stream_order, "nccl", 2)
    assert ahead is True and seen == [[float(number)] for number in range(1, 7)]


class TestNccl(ChannelSuite):
    kind: ClassVar[Kind] = "nccl"
    ranks: ClassVar[int] = 2
    notices_death: ClassVar[bool] = False


class TestIpcBetweenGpus(ChannelSuite):
    kind: ClassVar[Kind] = "ipc between GPUs"
    ranks: ClassVar[int] = 2

    def test_memory_that_vllm_puts_to_sleep_is_received_into(self) -> None:
        pytest.importorskip("vllm")
        assert run_case(into_memory_that_sleeps, self.kind, 2) == ["sent", "equal"]


def into_memory_that_sleeps(place: Place) -> object:
    """Rank 1 receives into memory of vLLM's allocator, which no other GPU can access."""
    sent = torch.arange(300_000, device=place.device)
    channel = place.open()
    if place.rank == 0:
        channel.send(sent, 1).wait()
        channel.agree()
        return "sent"
    from vllm.device_allocator.cumem import CuMemAllocator

    with CuMemAllocator.get_instance().use_memory_pool():
        got = torch.zeros_like(sent)
    channel.receive(got, 0).wait()
    channel.agree()
    return "equal" if torch.equal(got, sent) else "not equal"
