"""A channel inside one process: messages are queued, and every rank runs on its own thread."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from queue import Queue

from torch import Tensor

from dagrl.channels.base import Channel, PendingMessage, check_message
from dagrl.channels.spec import ChannelSpec
from dagrl.refit import RefitPlan, RefitReceiver, RefitReport, RefitSender, Verify
from dagrl.refit.carry.mapped import mapped_copy

Queues = Mapping[tuple[int, int], "Queue[Tensor]"]
DEADLINE_S = 30


class Done(PendingMessage):
    def __init__(self) -> None: ...
    def wait(self) -> None: ...


class MemoryChannel(Channel):
    def __init__(self, rank: int, size: int, queues: Queues) -> None:
        self.spec = ChannelSpec("gloo", "memory:0", rank, size)
        self.queues = queues

    def send(self, tensor: Tensor, peer: int) -> Done:
        check_message(self.spec, tensor, peer, "cpu")
        self.queues[self.spec.rank, peer].put(tensor.clone())
        return Done()

    def receive(self, tensor: Tensor, peer: int) -> Done:
        check_message(self.spec, tensor, peer, "cpu")
        message = self.queues[peer, self.spec.rank].get(timeout=DEADLINE_S)
        assert message.shape == tensor.shape and message.dtype == tensor.dtype, "the two ends differ in a message"
        tensor.copy_(message)
        return Done()

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Done]:
        return [*(self.send(*message) for message in sends), *(self.receive(*message) for message in receives)]

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        raise AssertionError("ends that run one after the other cannot wait for each other")

    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def _check_usable(self) -> None: ...


class Pair:
    """The sender (rank 0) and the receiver (rank 1) of a plan, which take turns in one thread."""

    def __init__(
        self,
        plan: RefitPlan,
        sent: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        verify: Verify = "off",
        channels: tuple[type[MemoryChannel], type[MemoryChannel]] = (MemoryChannel, MemoryChannel),
    ) -> None:
        self.queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
        first, second = (kind(rank, 2, self.queues) for rank, kind in enumerate(channels))
        self.sender = RefitSender(plan.for_rank(0, verify), sent, first)
        self.receiver = RefitReceiver(plan.for_rank(1, verify), received, second)

    def refit(self, version: int) -> None:
        self.sender.send(version)
        self.receiver.receive(version)


def copy_mapped(plan: RefitPlan, tensors: Sequence[Mapping[str, Tensor]]) -> None:
    """Carries a refit without relays as between processes on one GPU: from tensor to tensor."""
    for rank in range(plan.sources, plan.size):
        for bucket in plan.for_rank(rank).receives:
            mapped_copy([bucket], tensors[bucket.source], tensors[rank]).run()


def run_refit(
    plan: RefitPlan,
    tensors: Sequence[Mapping[str, Tensor]],
    version: int = 1,
    verify: Verify = "off",
    channel: type[MemoryChannel] = MemoryChannel,
) -> list[RefitReport]:
    """Runs all ranks of a refit, with the `tensors` of the sources first. Senders finish before receivers start."""
    queues: Queues = {pair: Queue() for pair in product(range(plan.size), repeat=2)}  # made before any thread asks for one

    def run(rank: int) -> RefitReport:
        end = channel(rank, plan.size, queues)
        if rank < plan.sources:
            return RefitSender(plan.for_rank(rank, verify), tensors[rank], end).send(version)
        return RefitReceiver(plan.for_rank(rank, verify), tensors[rank], end).receive(version)

    reports = [run(rank) for rank in range(plan.sources)]
    receivers = range(plan.sources, plan.size)
    if not any(bucket.source >= plan.sources for bucket in plan.buckets):
        reports += map(run, receivers)
    else:  # receivers wait for each other
        with ThreadPoolExecutor(len(receivers)) as threads:
            reports += threads.map(run, receivers)
    assert all(queue.empty() for queue in queues.values()), "messages that nobody received"
    return reports
