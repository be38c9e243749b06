"""A refit between two processes that share a GPU, as a case of `channel_cases`; on a CPU, with shared memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dagrl.channels import loans
from dagrl.channels.ipc import IpcChannel
from dagrl.channels.ipc_memory import HostSegment
from dagrl.channels.loans import BORROWED
from dagrl.refit import RefitReceiver, RefitSender
from tests import channel_cases as cases
from tests.unit.refit.weight_reference import Weights, equal, hf_weights, megatron_tensors, vllm_tensors, zeros_like


class SharedAllocation(NamedTuple):
    start: int
    name: str

    def handle(self) -> str:
        return self.name


class SharedMemory:
    """Allocates tensors on the host, and tells the allocation of a tensor as `allocation_of` does on a GPU."""

    def __init__(self) -> None:
        self.segments: list[HostSegment] = []

    def copies(self, tensors: Weights) -> Weights:
        """Copies of `tensors` in one new allocation, each at a multiple of 64 bytes."""
        steps = [-(-tensor.nbytes // 64) * 64 for tensor in tensors.values()]
        segment = HostSegment(64 + sum(steps))
        self.segments.append(segment)
        found, end = {}, 64
        for (name, tensor), step in zip(tensors.items(), steps, strict=True):
            place = segment.bytes[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            found[name], end = place.copy_(tensor), end + step
        return found

    def allocation_of(self, tensor: torch.Tensor) -> SharedAllocation:
        (segment,) = (one for one in self.segments if 0 <= tensor.data_ptr() - one.bytes.data_ptr() < len(one.bytes))
        return SharedAllocation(segment.bytes.data_ptr(), segment.handle)


def mapped_refit(place: cases.Place) -> object:
    """Five versions. Returns how many rounds of messages each took.

    At the second the sender's memory was given back and taken again, at the same addresses. Its tensors have new memory at
    the third, the receiver's at the fourth, and the sender's again at the fifth, memory that cannot be mapped.
    """
    plan, layout = cases._refit_plan(2, devices=("gpu", "gpu"))
    channel, memory = place.open(), SharedMemory()
    assert isinstance(channel, IpcChannel)
    if place.device == "cpu":
        loans.allocation_of = memory.allocation_of  # type: ignore[assignment]
    weights = hf_weights(cases.CONFIG)
    expected = vllm_tensors(weights, cases.CONFIG, 1, 0)
    held = megatron_tensors(weights, cases.CONFIG, layout, 0) if place.rank == 0 else zeros_like(expected)

    def allocated(tensors: Weights) -> Weights:
        if place.device == "cpu":
            return memory.copies(tensors)
        return {name: tensor.to(place.device).clone() for name, tensor in tensors.items()}

    live = {name: torch.nn.Parameter(tensor) for name, tensor in allocated(held).items()}
    mine = plan.for_rank(place.rank)
    end = RefitReceiver(mine, live, channel) if place.rank else RefitSender(mine, live, channel, lends=True)
    rounds = []
    for version in range(1, 6):
        if version == 2 and isinstance(end, RefitSender):
            end.reclaim()
        if (version in (3, 5) and place.rank == 0) or (version == 4 and place.rank == 1):
            if isinstance(end, RefitSender):
                assert channel._table[1, BORROWED]
                end.reclaim()
                assert not channel._table[1, BORROWED]
            if version == 5:
                loans.allocation_of = lambda tensor: None
            for name, tensor in allocated({name: one.data for name, one in live.items()}).items():
                live[name].data = tensor
        _ = end.send(version) if isinstance(end, RefitSender) else end.receive(version)
        assert channel._loans._count == (0 if place.rank else (0, 1, 2, 3, 3, 3)[version])
        rounds.append(len(end.rounds.sends) + len(end.rounds.receives))
        if place.rank == 0:
            for parameter in live.values():
                parameter.data += 1
        else:
            shifted = {name: tensor + (version - 1) * (tensor != 0) for name, tensor in expected.items()}
            assert equal({name: parameter.data.cpu() for name, parameter in live.items()}, shifted), version
    channel.close()
    return rounds
