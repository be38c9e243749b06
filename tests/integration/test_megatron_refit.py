"""A Megatron worker sends its live weights in a refit to a receiver in this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.channels import ChannelSpec, open_channel
from dagrl.refit import RefitPlan, RefitReceiver, plan_refit
from dagrl.runtime.shapes import Batch
from dagrl.runtime.store import reserve_port
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import Case, each, logprobs, megatron, train
from tests.integration.train_pool import Group, WorkerError, WorkerPool
from tests.integration.vllm_models import whole_model


@each([megatron("qwen3_tied", tp=2, pp=2), megatron("qwen3_moe", dp=2, ep=2)])
def test_weights_after_each_step_arrive(case: Case, pool: WorkerPool) -> None:
    batch = reference.make_batch()
    with case.group(pool) as group:
        weights = reference.assemble(group.call("weights"))
        received = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
        plan = plan_refit(group.call("weight_slices"), [whole_model(received)], dtype="float32")
        with receiving(group, plan, received) as receive:
            group.call("snapshot_reference")
            for version in (1, 2):
                train(group, batch)
                logprobs(group, batch, "reference")  # temporarily points the parameters elsewhere
                reports = receive(version)
                assert sum(report.bytes_sent for report in reports) == 4 * sum(one.numel() for one in received.values())
                for name, expected in reference.assemble(group.call("weights")).items():
                    np.testing.assert_array_equal(received[name].numpy(), expected, err_msg=name)
        if case.model == "qwen3_moe":
            check_aborts(group, batch)


@contextmanager
def receiving(group: Group, plan: RefitPlan, received: dict[str, torch.Tensor]) -> Iterator[Callable[[int], Any]]:
    """Connects a group to a receiver in this process. Gives a function that runs the refit of a version."""
    size, address = plan.size, f"127.0.0.1:{reserve_port()}"
    specs = [ChannelSpec("gloo", address, rank, size, 30.0) for rank in range(size)]
    for rank in range(size - 1):
        group.start(rank, "prepare_refit", plan.for_rank(rank), specs[rank])
    channel = open_channel(specs[-1])
    for rank in range(size - 1):
        group.finish(rank)
    receiver = RefitReceiver(plan.for_rank(size - 1), received, channel)

    def receive(version: int) -> Any:
        thread = threading.Thread(target=receiver.receive, args=(version,))
        thread.start()
        reports = group.call("send_weights", version)
        thread.join(30)
        return reports

    yield receive
    channel.close()


def check_aborts(group: Group, batch: Batch) -> None:
    """Checks that an abort after a failed refit does not affect training, and that a later one does."""
    with pytest.raises(WorkerError, match="ChannelError"):
        group.call("send_weights", 3)
    group.call("abort")
    train(group, batch)
    group.call("abort")
    with pytest.raises(WorkerError, match="was aborted; restart the group"):
        train(group, batch)
