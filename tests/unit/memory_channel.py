"""A channel inside one process: messages wait in queues, so senders can run to their end before receivers start."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from dagrl.channels.base import ChannelSpec, check_message
from dagrl.refit import RefitPlan, RefitReceiver, RefitReport, RefitSender

Queues = Mapping[tuple[int, int], deque[Tensor]]


class Done:
    def wait(self) -> None:
        pass


class MemoryChannel:
    def __init__(self, rank: int, size: int, queues: Queues) -> None:
        self.spec = ChannelSpec("gloo", "memory:0", rank, size)
        self.queues = queues

    def send(self, tensor: Tensor, peer: int) -> Done:
        check_message(self.spec, tensor, peer, "cpu")
        self.queues[self.spec.rank, peer].append(tensor.clone())
        return Done()

    def receive(self, tensor: Tensor, peer: int) -> Done:
        check_message(self.spec, tensor, peer, "cpu")
        tensor.copy_(self.queues[peer, self.spec.rank].popleft())
        return Done()

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Done]:
        return [*(self.send(*message) for message in sends), *(self.receive(*message) for message in receives)]

    def synchronize(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def run_refit(plan: RefitPlan, tensors: Sequence[Mapping[str, Tensor]], version: int = 1) -> list[RefitReport]:
    """All ranks of a refit, one after the other; `tensors` of the sources first."""
    queues: Queues = defaultdict(deque)
    reports = []
    for rank, mine in enumerate(tensors):
        channel = MemoryChannel(rank, plan.size, queues)
        if rank < plan.sources:
            reports.append(RefitSender(plan.for_rank(rank), mine, channel).send(version))
        else:
            reports.append(RefitReceiver(plan.for_rank(rank), mine, channel).receive(version))
    assert not any(queues.values()), "messages that nobody received"
    return reports
