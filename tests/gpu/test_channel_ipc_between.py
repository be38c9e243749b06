"""The channel suite between two GPUs, over CUDA IPC, and into memory that only its own GPU can access; needs cupy."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.channel_cases import Kind, Place, run_case
from tests.channel_suite import ChannelSuite

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
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
