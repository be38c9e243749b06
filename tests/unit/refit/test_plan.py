"""Refit plans: any layout into any other, bit for bit; balance, order and buckets; hosts; errors that name every mistake."""

import gc
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dagrl.errors import RefitPlanError
from dagrl.refit import RefitPlan, Verify, WeightSlice, plan_refit
from dagrl.refit.carry.endpoint import RefitRounds
from dagrl.refit.plan.coverage import PlacedPart, cover, distinct_lists, index_sources, prove_covered
from dagrl.refit.plan.ordering import BETWEEN_HOSTS, order_rounds, simulate
from dagrl.refit.plan.routes import RankPair
from dagrl.refit.slices import Box, Scales, expand, volume
from dagrl.refit.strided import stack_experts
from dagrl.refit.transfers import DIRECT_BYTES, aligned
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import EMBEDDING, megatron_weight_slices
from tests.unit.refit.memory_channel import MemoryChannel, copy_mapped, run_refit
from tests.unit.refit.weight_reference import (
    Config,
    VllmRank,
    Weights,
    equal,
    hf_weights,
    megatron_tensors,
    model_config,
    vllm_tensors,
    vllm_weight_slices,
)

TiedHead = Literal["one tensor", "two names", "own memory"]
"""An engine's tied head: not described, described as a second name of the same memory, or in its own memory."""


def megatron_slices(config: Config, layout: ParallelLayout) -> list[list[WeightSlice]]:
    return [megatron_weight_slices(config, layout, rank) for rank in range(layout.world_size)]


def check_megatron_to_vllm(
    config: Config,
    layout: ParallelLayout,
    tp: int,
    replicas: int,
    bucket_bytes: int,
    *,
    ep: bool = False,
    ranks_a_host: int = 0,
    verify: Verify = "off",
    dtype: torch.dtype = torch.float32,
    tied_head: TiedHead = "one tensor",
    direct_bytes: int = DIRECT_BYTES,
    mapped: bool = False,
) -> RefitPlan:
    """Asserts that vLLM's tensors equal slices of the whole model bit for bit, cast to `dtype`."""
    ranks = [VllmRank(tp, rank, expert_parallel=ep) for _ in range(replicas) for rank in range(tp)]
    size = layout.world_size + len(ranks)
    weights, held = hf_weights(config), megatron_slices(config, layout)
    sources = [megatron_tensors(weights, config, layout, rank) for rank in range(layout.world_size)]
    aliases = {}
    if config["tie_word_embeddings"] and tied_head != "one tensor":
        config, aliases = dict(config, tie_word_embeddings=False), {"lm_head.weight": EMBEDDING}
        weights["lm_head.weight"] = weights[EMBEDDING]
    wanted = [vllm_weight_slices(config, rank) for rank in ranks]
    expected = [vllm_tensors(weights, config, tp, rank.tp_rank, ep) for rank in ranks]
    if aliases and tied_head == "two names":
        held = [name_again(mine, EMBEDDING, tensors) for mine, tensors in zip(held, sources, strict=True)]
    hosts = [rank // ranks_a_host for rank in range(size)] if ranks_a_host else None
    options: Any = {"aliases": aliases, "bucket_bytes": bucket_bytes, "hosts": hosts, "direct_bytes": direct_bytes}
    plan = plan_refit(held, wanted, dtype="float32", **options)
    for mine, slices in zip(expected, wanted, strict=True):
        kept = {one.tensor for one in expand(slices) if one.dtype}
        mine.update({name: tensor.to(dtype) for name, tensor in mine.items() if name not in kept})
    built = [{name: torch.zeros_like(tensor) for name, tensor in tensors.items()} for tensors in expected]
    if aliases and tied_head == "two names":
        for tensors in built:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if mapped and all(bucket.source < plan.sources for bucket in plan.buckets):
        copy_mapped(plan, [*sources, *built])
    else:
        run_refit(plan, [*sources, *built], verify=verify)
    assert all(equal(ours, theirs) for ours, theirs in zip(built, expected, strict=True))
    check_rounds(plan)
    assert plan.summary().staging_bytes <= 2 * aligned(bucket_bytes)
    return plan


def name_again(slices: list[WeightSlice], embedding: str, tensors: Weights) -> list[WeightSlice]:
    """The slices of a rank that describes its embedding twice, under two names of the same memory."""
    second = [replace(one, tensor=f"again.{one.tensor}") for one in slices if one.name == embedding]
    tensors.update({one.tensor: tensors[one.tensor.removeprefix("again.")] for one in second})
    return [*second, *slices]


def check_rounds(plan: RefitPlan) -> None:
    """Asserts that in a round each rank sends and receives at most one bucket, and that rounds are in order."""
    senders = Counter((bucket.round, bucket.source) for bucket in plan.buckets)
    receivers = Counter((bucket.round, bucket.destination) for bucket in plan.buckets)
    assert set(senders.values()) | set(receivers.values()) <= {1}
    rounds = [bucket.round for bucket in plan.buckets]
    assert rounds == sorted(rounds)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_grids_of_sources_that_overlap(data: st.DataObject) -> None:
    """Sources of several grids over one 3-d parameter, whose boxes differ and overlap."""
    shape = data.draw(st.tuples(*[st.integers(1, 7)] * 3))

    def grid() -> list[Box]:
        cuts = [sorted({0, size, *data.draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
        edges = [list(pairwise(cut)) for cut in cuts]
        return [(x, y, z) for x in edges[0] for y in edges[1] for z in edges[2]]

    whole = torch.arange(1, volume(tuple((0, size) for size in shape)) + 1, dtype=torch.float32).view(shape)
    boxes = [box for _ in range(data.draw(st.integers(1, 3))) for box in grid()]
    wanted = grid()
    direct = data.draw(st.sampled_from([1, 20, DIRECT_BYTES]))
    sides = ([[held(box)] for box in side] for side in (boxes, wanted))
    plan = plan_refit(*sides, dtype="float32", bucket_bytes=64, direct_bytes=direct)
    sources = [{"t": whole[tuple(slice(a, b) for a, b in box)]} for box in boxes]
    built = [{"t": torch.zeros([b - a for a, b in box])} for box in wanted]
    run_refit(plan, [*sources, *built])
    for ours, box in zip(built, wanted, strict=True):
        assert torch.equal(ours["t"], whole[tuple(slice(a, b) for a, b in box)])


def held(box: Box, name: str = "p") -> WeightSlice:
    return WeightSlice(name, box, "t", tuple((0, stop - start) for start, stop in box))


def test_replicas_share_the_bytes() -> None:
    config = model_config(hidden_size=64, vocab_size=4000)
    plan = check_megatron_to_vllm(config, ParallelLayout(dp=4), 2, 2, 4096)
    sent = plan.summary().sent
    assert max(sent) <= 1.1 * sum(sent) / len(sent)


def test_equal_layouts_pair_up_without_small_messages_across() -> None:
    """Every source holds the norms, but they open no pairs of their own."""
    config = model_config(hidden_size=64, vocab_size=4096, num_key_value_heads=4)
    plan = check_megatron_to_vllm(config, ParallelLayout(tp=4), 4, 1, 1 << 20)
    assert sorted(plan.summary().pairs) == [(rank, rank + 4) for rank in range(4)]
    assert plan.summary().rounds == 1


def test_buckets_are_bounded_and_summary_adds_up() -> None:
    config = model_config(hidden_size=64, vocab_size=1000)
    plan = check_megatron_to_vllm(config, ParallelLayout(tp=2), 2, 1, 4096)
    assert max(bucket.nbytes for bucket in plan.buckets) <= 4096
    summary = plan.summary()
    assert sum(summary.pairs.values()) == sum(summary.sent) == sum(summary.received)
    elements = sum(volume(s.box) for rank in range(2) for s in vllm_weight_slices(config, VllmRank(2, rank)))
    assert sum(summary.received) == 4 * elements
    assert summary.staging_bytes <= 2 * 4096
    assert str(summary).startswith(f"refit of {sum(summary.received) / 1e6:.3f} MB from 2 to 2 ranks")
    assert len(str(summary).splitlines()) == 4 + len(summary.pairs)


@pytest.mark.parametrize(("ranks", "largest"), [(1, 256 << 20), (2, 256 << 20), (8, 64 << 20)])
def test_mailboxes_of_a_sender_take_at_most_one_gibibyte(ranks: int, largest: int) -> None:
    """2 GiB for each receiver, in the largest buckets of which two fit a mailbox."""
    box = ((0, 256), (0, 8192))
    whole = [WeightSlice(f"p{number}", box, f"p{number}", box) for number in range(512)]
    plan = plan_refit([whole] * ranks, [whole] * ranks, dtype="bfloat16", mailboxes=True)
    boxes: dict[tuple[int, int], int] = defaultdict(int)
    for bucket in plan.buckets:
        boxes[bucket.source, bucket.destination] = max(boxes[bucket.source, bucket.destination], bucket.nbytes)
    assert 0.9 * largest < max(boxes.values()) <= largest
    for sender in range(ranks):
        assert sum(2 * nbytes for (source, _), nbytes in boxes.items() if source == sender) <= 1 << 30
    assert plan.summary().staging_bytes >= max(2 * nbytes for nbytes in boxes.values())


def test_small_parameters_share_buckets_up_to_the_limit() -> None:
    slices = [WeightSlice(f"p{number}", ((0, 4),), f"p{number}", ((0, 4),)) for number in range(8)]
    plan = plan_refit([slices], [slices, slices[:4]], dtype="float32", bucket_bytes=128)
    assert sorted(bucket.nbytes for bucket in plan.buckets) == [64, 128]


def test_sources_with_partly_equal_layouts_send_from_their_own_tensors() -> None:
    names = [f"p{number}" for number in range(32)]
    tensors = [{f"{name}.{rank * (at % 2)}": name for at, name in enumerate(names)} for rank in range(2)]
    sources = [[WeightSlice(name, ((0, 4),), tensor, ((0, 4),)) for tensor, name in mine.items()] for mine in tensors]
    wanted = [WeightSlice(name, ((0, 4),), name, ((0, 4),)) for name in names]
    plan = plan_refit(sources, [wanted] * 2, dtype="float32")
    values, built = {name: torch.randn(4) for name in names}, [{name: torch.zeros(4) for name in names} for _ in range(2)]
    run_refit(plan, [*({tensor: values[name] for tensor, name in mine.items()} for mine in tensors), *built])
    assert all(equal(one, values) for one in built)


@pytest.mark.parametrize(("number", "rows"), [(1, 64), (32, 1)], ids=["cut", "small"])
def test_parts_held_twice_count_twice_in_a_bucket(number: int, rows: int) -> None:
    """For example an embedding and a separate head that are filled from one tied embedding."""
    once = [replace(held(((0, rows), (0, 8)), f"p{at}"), tensor=f"p{at}") for at in range(number)]
    again = [replace(one, name=one.name.replace("p", "q"), tensor=one.name.replace("p", "q")) for one in once]
    aliases = {second.name: first.name for first, second in zip(once, again, strict=True)}
    plan = plan_refit([once], [[*once, *again], once], dtype="float32", aliases=aliases, bucket_bytes=512)
    assert max(bucket.nbytes for bucket in plan.buckets) == 512
    values = {one.name: torch.randn(rows, 8) for one in once}
    both = values | {aliased: values[name] for aliased, name in aliases.items()}
    built = [{name: torch.zeros(rows, 8) for name in expected} for expected in (both, values)]
    run_refit(plan, [values, *built])
    assert equal(built[0], both) and equal(built[1], values)


def test_expand_splits_a_stack() -> None:
    """Two experts of a rank, the sixth and seventh of a layer: in one tensor, in one each, and scales in one tensor."""
    box, scales = ((5, 7), (0, 128), (0, 256)), Scales("s", ((2, 4), (0, 1), (0, 2)))
    one = WeightSlice("e.*.w", box, "w", ((2, 4), *box[1:]), "float8_e4m3fn", scales)
    assert list(expand([one])) == [
        WeightSlice(
            f"e.{at + 3}.w", box[1:], "w", ((at, at + 1), *box[1:]), one.dtype, Scales("s", ((at, at + 1), (0, 1), (0, 2)))
        )
        for at in (2, 3)
    ]
    own = WeightSlice("e.*.w", box, "w.*", ((2, 4), *box[1:]))
    assert list(expand([own])) == [WeightSlice(f"e.{at + 3}.w", box[1:], f"w.{at}", box[1:]) for at in (2, 3)]


def test_the_same_input_gives_the_same_plan() -> None:
    config = model_config()
    sources, wanted = megatron_slices(config, ParallelLayout(dp=2)), [vllm_weight_slices(config, VllmRank(1, 0))]
    plans = [plan_refit(sources, wanted, dtype="float32", bucket_bytes=bytes_) for bytes_ in (512, 512, 1024)]
    assert plans[0].digest == plans[1].digest
    assert [plans[0].for_rank(rank) for rank in range(3)] == [plans[1].for_rank(rank) for rank in range(3)]
    assert plans[0].digest != plans[2].digest


def test_plans_with_equal_byte_counts_have_different_digests() -> None:
    """The digest covers each rank's slices, their names and positions: ranks with different plans must not connect."""
    whole, low, high = ((0, 4),), ((0, 2),), ((2, 4),)
    first, second = WeightSlice("p", low, "t", low), WeightSlice("p", high, "t", low)
    plans = [
        ([held(whole)], [[first], [second], [first]]),
        ([held(whole)], [[first], [first], [second]]),
        ([held(whole)], [[replace(first, local=high)], [second], [replace(first, local=high)]]),
        ([held(whole)], [[replace(first, tensor="u")], [second], [replace(first, tensor="u")]]),
        ([replace(held(whole), tensor="u")], [[first], [second], [first]]),
    ]
    digests = {plan_refit([mine], wanted, dtype="float32").digest for mine, wanted in plans}
    assert len(digests) == len(plans)


@pytest.mark.parametrize("setting", [True, False])
def test_planning_restores_the_garbage_collector(setting: bool) -> None:
    enabled = gc.isenabled()
    try:
        (gc.enable if setting else gc.disable)()
        plan_refit([[held(((0, 6),))]], [[held(((0, 6),))]], dtype="float32")
        assert gc.isenabled() is setting
        with pytest.raises(RefitPlanError, match="no source holds"):  # found while planning
            plan_refit([[held(((0, 2),))], [held(((3, 6),))]], [[held(((0, 6),))]], dtype="float32")
        assert gc.isenabled() is setting
    finally:
        (gc.enable if enabled else gc.disable)()


def test_a_missing_parameter_is_named_on_either_side() -> None:
    config = model_config()
    (source,), wanted = megatron_slices(config, ParallelLayout()), vllm_weight_slices(config, VllmRank(1, 0))
    fewer, lacking = ([one for one in side if "k_norm" not in one.name] for side in (source, wanted))
    for sent, received, message in ((source, lacking, "sources have .* dest"), (fewer, wanted, "destinations have .* so")):
        with pytest.raises(RefitPlanError, match=rf"the {message}\w+ lack: 'model.layers.0.self_attn.k_norm.weight'"):
            plan_refit([sent], [received], dtype="float32")


ROW: Box = ((0, 2),)
TWICE = [WeightSlice("p", ROW, "t", ROW), WeightSlice("q", ROW, "t", ((1, 3),))]
WRITTEN_TWICE = r"\(\(1, 2\),\) of the destination tensor 't' would be written twice: by parameter 'p'"
ENDS = [[held(((0, 2), (0, 4)))], [held(((4, 6), (0, 4)))]]


@pytest.mark.parametrize(
    ("sources", "wanted", "message"),
    [
        (ENDS, [held(((0, 6), (0, 4)))], r"'p': no source holds \(\(2, 4\), \(0, 4\)\)"),
        ([[held(((0, 6),))]], [held(((0, 5),))], r"'p' is \(\(0, 6\),\) in the sources but \(\(0, 5\),\) in the dest"),
        ([[held(ROW), held(ROW, "q")]], TWICE, WRITTEN_TWICE),
    ],
    ids=["gap", "shapes", "written twice"],
)
def test_mismatched_slices_are_named(sources: list[list[WeightSlice]], wanted: list[WeightSlice], message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        plan_refit(sources, [wanted], dtype="float32")


def test_the_proof_finds_a_lost_and_a_duplicated_part() -> None:
    wanted = held(((0, 6), (0, 4)))
    index = index_sources(distinct_lists([[held(((0, 3), (0, 4)))], [held(((3, 6), (0, 4)))]]))
    pieces = [PlacedPart(part, wanted) for part in cover(wanted, index, "p", 1 << 20)]
    prove_covered([wanted], pieces)
    with pytest.raises(RefitPlanError, match="12 of the 24 elements"):
        prove_covered([wanted], pieces[:1])
    with pytest.raises(RefitPlanError, match="written twice"):
        prove_covered([wanted], [*pieces, pieces[0]])
    shifted = PlacedPart(replace(pieces[1].part, box=((4, 7), (0, 4))), wanted)
    with pytest.raises(RefitPlanError, match="every element must be written exactly once"):
        prove_covered([wanted], [pieces[0], shifted])


def test_single_experts_are_described_without_a_stack() -> None:
    """With FSDP or expert parallelism over as many ranks as experts."""
    weights, rows = torch.randn(4, 3, 2), ((0, 3), (0, 2))

    def described(experts: list[int]) -> list[WeightSlice]:
        return stack_experts(
            WeightSlice(f"layer.experts.{expert}.up.weight", rows, "up", ((at, at + 1), *rows))
            for at, expert in enumerate(experts)
        )

    own_tensors = WeightSlice("layer.experts.*.up.weight", ((2, 4), *rows), "up*", ((0, 2), *rows))
    wanted = [[0, 1, 2, 3], [2], [3, 0, 1]]
    plan = plan_refit([described([0]), described([1]), [own_tensors]], list(map(described, wanted)), dtype="float32")
    built = [{"up": torch.zeros(len(experts), 3, 2)} for experts in wanted]
    run_refit(plan, [{"up": weights[:1]}, {"up": weights[1:2]}, {"up0": weights[2], "up1": weights[3]}, *built])
    assert all(tensors["up"].equal(weights[experts]) for tensors, experts in zip(built, wanted, strict=True))


Part = tuple[int, int, int]


def time_of(durations: dict[RankPair, list[int]], after: dict[Part, Part] | None = None) -> float:
    ordered = order_rounds(durations, after)
    return simulate((number, sender, to, durations[sender, to][at]) for number, sender, to, at in ordered)


def test_simulated_durations() -> None:
    assert simulate([]) == 0
    assert simulate([(0, 0, 2, 3.0), (0, 1, 3, 5.0)]) == 5  # in parallel
    assert simulate([(0, 0, 2, 3.0), (1, 1, 2, 5.0)]) == 8  # one receiver
    assert simulate([(0, 0, 2, 3.0), (1, 2, 3, 5.0)]) == 8  # relayed
    assert simulate([(0, 0, 2, 3.0), (0, 2, 3, 1.0), (1, 5, 2, 1.0)]) == 4  # rank 2 waits for its round
    assert simulate([(0, 0, 2, 5.0), (1, 1, 3, 1.0)]) == 5  # the last to end is not the last to start
    # A rank without a bucket in a round stays as busy as before.
    assert simulate([(0, 0, 2, 3.0), (1, 1, 3, 1.0), (2, 0, 3, 1.0)]) == 4


@pytest.mark.parametrize(
    ("durations", "best"),
    [
        ({(0, 2): [4], (0, 3): [4], (1, 2): [4], (1, 3): [4]}, 8),  # two permutations
        ({(s, r): [1] for s in range(8) for r in range(8, 16)}, 8),  # a latin square
        ({(0, 1): [1, 9, 1], (2, 3): [11]}, 11),
        ({(0, 2): [9], (0, 3): [1], (1, 3): [9], (1, 2): [1]}, 10),  # slow messages together, fast ones together
        ({(0, 3): [8], (1, 3): [2], (1, 4): [4], (2, 4): [1, 8]}, 13),  # so a receiver receives the slowest first,
        ({(0, 4): [4], (1, 3): [2], (1, 4): [4], (2, 3): [4]}, 8),  # then from the sender with the most left,
        ({(0, 3): [2, 2], (1, 3): [2], (1, 4): [1], (2, 4): [4]}, 6),  # not the one with the most at first
        ({(0, 3): [1], (0, 5): [3], (1, 4): [3], (1, 5): [9]}, 12),  # receivers with the most left come first,
        ({(0, 3): [4, 4], (0, 4): [2], (1, 4): [4], (1, 5): [8]}, 12),  # not those with the most at first
        ({(0, 3): [5, 9], (3, 4): [2, 2]}, 14),  # rank 3 relays after it has received all of the first bucket
        ({(0, 3): [2], (0, 4): [2, 2], (1, 3): [3]}, 6),  # no rank starts while it is busy
    ],
)
def test_small_cases_are_optimal(durations: dict[RankPair, list[int]], best: int) -> None:
    assert time_of(durations) == best


def test_ranks_relay_while_others_still_receive_from_other_hosts() -> None:
    """Eight leaders get an eighth each over slow links and relay it to seven others, as fast as the links allow."""
    slow, fast, hosts = 90, 10, range(8, 16)
    durations = {(rank - 8, rank): [slow] * 4 for rank in hosts}
    durations |= {(leader, rank): [fast] * 4 for leader in hosts for rank in hosts if rank != leader}
    pairs = [(leader, rank, at) for leader in hosts for rank in hosts if rank != leader for at in range(4)]
    after = {(leader, rank, at): (leader - 8, leader, at) for leader, rank, at in pairs}
    assert time_of(durations, after) == 4 * (slow + 7 * fast)


@given(st.data())
def test_invariants_of_random_rounds(data: st.DataObject) -> None:
    """One bucket each way, pairs in order, relays after arrival, and never twice as slow as the busiest rank."""
    senders, hosts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    leaders = range(senders, senders + hosts)
    length = st.lists(st.integers(1, 50), min_size=1, max_size=4)
    durations: dict[RankPair, list[int]] = {
        (sender, to): data.draw(length) for sender in range(senders) for to in leaders if data.draw(st.booleans())
    }
    relayed = data.draw(st.booleans())
    after = {}
    if relayed:
        for (sender, leader), buckets in list(durations.items()):
            to = leader + hosts  # its own follower
            first = len(durations.get((leader, to), []))
            durations[leader, to] = [*durations.get((leader, to), []), *(max(1, one // 9) for one in buckets)]
            after |= {(leader, to, first + at): (sender, leader, at) for at in range(len(buckets))}
    ordered = list(order_rounds(durations, after))
    every = [(s, r, at) for (s, r), buckets in durations.items() for at in range(len(buckets))]
    assert sorted((s, r, at) for _, s, r, at in ordered) == sorted(every)
    for side in (1, 2):  # a rank sends one bucket in a round, and receives one
        assert set(Counter((entry[0], entry[side]) for entry in ordered).values()) <= {1}
    rounds = {(s, r, at): number for number, s, r, at in ordered}
    assert all(rounds[s, r, at] < rounds[s, r, at + 1] for s, r, at in rounds if (s, r, at + 1) in rounds)
    assert all(rounds[before] < rounds[bucket] for bucket, before in after.items())
    numbers = [entry[0] for entry in ordered]
    assert numbers == sorted(numbers) and set(numbers) == set(range(len(set(numbers))))
    loads: dict[int, int] = defaultdict(int)
    for (sender, to), buckets in durations.items():
        loads[sender] += sum(buckets)
        loads[to] += sum(buckets)
    if not relayed:  # while a bucket waits, one of its ranks is busy
        assert time_of(durations) <= max((loads[s] + loads[r] for s, r in durations), default=0)


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


@pytest.mark.parametrize(("sources", "destinations"), [("ss", "abcb"), ("sso", "abba"), ("soosp", "abcbac")])
def test_every_rank_sends_from_its_own_tensors(sources: str, destinations: str) -> None:
    """Tensor names may differ per rank. Sent and relayed bytes come from the sender's own tensors."""
    whole = held(((0, 64), (0, 8)))
    sides = [[[replace(whole, tensor=name)] for name in names] for names in (sources, destinations)]
    hosts = [0] * len(sources) + [1 + 2 * at // len(destinations) for at in range(len(destinations))]
    weights, built = torch.randn(64, 8), [{name: torch.zeros(64, 8)} for name in destinations]
    plan = plan_refit(*sides, dtype="float32", bucket_bytes=512, hosts=hosts)
    run_refit(plan, [*({name: weights} for name in sources), *built])
    assert all(torch.equal(tensor, weights) for tensors in built for tensor in tensors.values())
