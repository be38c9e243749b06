"""Refits across hosts: each byte is sent to a host once and relayed there; near sources are preferred; the summary."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from dagrl.errors import RefitPlanError
from dagrl.refit import RefitPlan, plan_refit
from dagrl.refit.carry.rounds import RefitRounds
from dagrl.refit.plan.ordering import BETWEEN_HOSTS
from dagrl.refit.slices import volume
from dagrl.runtime.layout import ParallelLayout
from tests.unit.refit.memory_channel import MemoryChannel, run_refit
from tests.unit.refit.test_plan import check_megatron_to_vllm, held, megatron_slices
from tests.unit.refit.weight_reference import (
    Config,
    VllmRank,
    hf_weights,
    megatron_tensors,
    model_config,
    vllm_tensors,
    vllm_weight_slices,
)

CONFIG = model_config("qwen3_moe", hidden_size=32, vocab_size=1000)


def plan_of(config: Config, replicas: int, hosts: list[int] | None) -> RefitPlan:
    wanted = [vllm_weight_slices(config, VllmRank(2, rank)) for rank in range(2)] * replicas
    layout = ParallelLayout(dp=2, ep=2)
    return plan_refit(megatron_slices(config, layout), wanted, dtype="float32", hosts=hosts, bucket_bytes=8192)


def test_a_byte_is_sent_to_each_host_once() -> None:
    """Two engines of two ranks on one host, one on another: each host gets the model once, although ranks share norms."""
    hosts = [0, 0, 1, 1, 1, 1, 2, 2]
    plan = plan_of(CONFIG, 3, hosts)
    unique = {(one.name, one.box) for rank in range(2) for one in vllm_weight_slices(CONFIG, VllmRank(2, rank))}
    nbytes = 4 * sum(volume(box) for _, box in unique)
    links = plan.summary().links
    for host in (1, 2):
        assert nbytes <= links[0, host] < 1.01 * nbytes  # alignment
        assert f"  host   0 -> host {host}   {f'{links[0, host] / 1e6:,.3f} MB':>14}" in str(plan.summary())


def test_relayed_weights_arrive() -> None:
    plan = check_megatron_to_vllm(CONFIG, ParallelLayout(dp=2, ep=2), 2, 4, 4096, ranks_a_host=5, verify="checksum")
    relays = [bucket for bucket in plan.buckets if bucket.source >= plan.sources]
    assert relays
    arrivals = {(group, bucket.destination): bucket.round for bucket in plan.buckets for group in bucket.groups}
    for bucket in relays:
        assert all(arrivals[group, bucket.source] < bucket.round for group in bucket.groups)


def test_a_relaying_rank_has_staging_for_both_directions() -> None:
    """The memory of bound ranks is at most what the summary says: two buckets of the limit, also for a rank that relays."""
    layout = ParallelLayout(dp=2, ep=2)
    plan = plan_of(CONFIG, 3, [0, 0, 1, 1, 1, 1, 2, 2])
    weights = hf_weights(CONFIG)
    tensors = [megatron_tensors(weights, CONFIG, layout, rank) for rank in range(2)]
    tensors += [vllm_tensors(weights, CONFIG, 2, rank) for rank in range(2)] * 3
    bound = [RefitRounds(plan.for_rank(rank), mine, MemoryChannel(rank, 8, {})) for rank, mine in enumerate(tensors)]
    taken = [one.staging_bytes for one in bound]
    largest = max(bucket.nbytes for bucket in plan.buckets)
    assert 2 * largest < max(taken) <= plan.summary().staging_bytes <= 2 * 8192
    boxes = replace(plan, mailboxes=True).summary().staging_bytes
    assert plan.summary().staging_bytes < boxes <= plan.summary().staging_bytes + 2 * largest * 7


def test_leaders_take_turns() -> None:
    received = plan_of(model_config(hidden_size=64, vocab_size=4000), 4, [0, 0, *[1] * 8])
    from_outside: dict[int, int] = defaultdict(int)
    for bucket in received.buckets:
        if bucket.source < received.sources:
            from_outside[bucket.destination] += bucket.nbytes
    counts = [from_outside[rank] for rank in range(2, 10)]
    assert max(counts) <= 1.3 * sum(counts) / len(counts)


def test_a_source_on_the_same_host_is_preferred() -> None:
    plan = plan_of(model_config(), 2, [0, 1, 0, 0, 1, 1])
    assert plan.summary().crossing == 0
    assert not [bucket for bucket in plan.buckets if bucket.source >= plan.sources]


def test_the_floor_is_that_of_the_busiest_link() -> None:
    plan = plan_of(model_config(), 1, [0, 0, 1, 1])
    summary = plan.summary()
    worst = max(*summary.sent, *summary.received)
    assert 0.999 * max(summary.sent) <= summary.floor_s * BETWEEN_HOSTS <= 1.001 * worst
    assert "2 hosts: " in str(summary) and "GB/s between hosts" in str(summary)


def test_a_wrong_number_of_hosts_is_rejected() -> None:
    with pytest.raises(RefitPlanError, match="got 3 hosts for a refit of 4 ranks"):
        plan_of(model_config(), 1, [0, 0, 1])


def test_relays_keep_the_dtype_of_a_destination_that_casts() -> None:
    """A float32 trainer and a bfloat16 engine: the second rank gets through the first what it would get directly."""
    box = ((0, 8), (0, 4))
    plan = plan_refit([[held(box)]], [[held(box)]] * 2, dtype="float32", hosts=[0, 1, 1])
    weights = torch.randn(8, 4)
    targets = [torch.zeros(8, 4, dtype=torch.bfloat16) for _ in range(2)]
    run_refit(plan, [{"t": weights}, *({"t": target} for target in targets)], verify="checksum")
    assert all(torch.equal(target, weights.bfloat16()) for target in targets)


@pytest.mark.parametrize(("sources", "destinations"), [("ss", "abcb"), ("sso", "abba"), ("soosp", "abcbac")])
def test_every_rank_sends_from_its_own_tensors(sources: str, destinations: str) -> None:
    """Tensor names may differ per rank. Sent and relayed bytes come from the sender's own tensors."""
    whole = held(((0, 64), (0, 8)))
    sides = [[[replace(whole, tensor=name)] for name in names] for names in (sources, destinations)]
    hosts = [0] * len(sources) + [1 + 2 * at // len(destinations) for at in range(len(destinations))]
    weights, built = torch.randn(64, 8), [{name: torch.zeros(64, 8)} for name in destinations]
    run_refit(
        plan_refit(*sides, dtype="float32", bucket_bytes=512, hosts=hosts), [*({name: weights} for name in sources), *built]
    )
    assert all(torch.equal(tensor, weights) for tensors in built for tensor in tensors.values())
