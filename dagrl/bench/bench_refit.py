"""A refit between two processes of this host under pytest-benchmark, for `--benchmark-compare`: a narrow model on the CPU.

pytest dagrl/bench/bench_refit.py --benchmark-columns=median,iqr,max,rounds
"""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Any

import pytest
import torch

from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.refit_truth import described
from dagrl.channels import Channel, ChannelSpec, open_channel
from dagrl.channels.base import wait_all
from dagrl.channels.spec import ChannelKind
from dagrl.refit import RefitReceiver, RefitSender, Verify, plan_refit
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.ports import reserve_port

CASE = RefitCase("trial", ParallelLayout(), 1)
ROUNDS, WARMUP_ROUNDS = 30, 5
SENDER, RECEIVER = 0, 1


def endpoint(spec: ChannelSpec, verify: Verify) -> tuple[Channel, RefitSender | RefitReceiver]:
    """Returns the channel and this rank's end of the refit."""
    sources, destinations = CASE.sources(), CASE.destinations()
    plan = plan_refit(sources, destinations, dtype="bfloat16", aliases=CASE.aliases).for_rank(spec.rank, verify)
    tensors = described((sources, destinations)[spec.rank][0], torch.device("cpu"))
    channel, end = open_channel(spec), RefitSender if spec.rank == SENDER else RefitReceiver
    return channel, end(plan, tensors, channel)


def receive(spec: ChannelSpec, verify: Verify, versions: int) -> None:
    """Takes so many refits, and tells the sender of each that it is complete."""
    channel, end = endpoint(spec, verify)
    assert isinstance(end, RefitReceiver)
    for version in range(versions):
        end.receive(version)
        wait_all(channel.exchange([(torch.zeros(1), SENDER)], []))
    channel.close()


@pytest.mark.parametrize("verify", ["off", "checksum"])
@pytest.mark.parametrize("kind", ["gloo", "ipc"])
def test_refit(benchmark: Any, kind: ChannelKind, verify: Verify) -> None:
    benchmark.group = f"refit, {CASE.name}, verify {verify}"
    address, versions = f"127.0.0.1:{reserve_port()}", ROUNDS + WARMUP_ROUNDS if benchmark.enabled else 1
    specs = [ChannelSpec(kind, address, rank, 2) for rank in (SENDER, RECEIVER)]
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(specs[RECEIVER], verify, versions))
    process.start()
    try:
        channel, end = endpoint(specs[SENDER], verify)
        assert isinstance(end, RefitSender)

        def refit(version: int) -> None:
            end.send(version)
            wait_all(channel.exchange([], [(torch.zeros(1), RECEIVER)]))

        numbers = itertools.count()
        benchmark.pedantic(refit, setup=lambda: ((next(numbers),), {}), rounds=ROUNDS, warmup_rounds=WARMUP_ROUNDS)
        channel.close()
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
