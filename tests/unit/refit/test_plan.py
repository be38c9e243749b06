"""Refit plans: any layout into any other, bit for bit; balance, rounds and buckets; errors that name every mismatch."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dagrl.errors import RefitPlanError
from dagrl.refit import RefitPlan, Verify, WeightSlice, plan_refit
from dagrl.refit.plan.coverage import PlacedPart, cover, distinct_lists, index_sources, prove_covered
from dagrl.refit.slices import Box, Scales, expand, volume
from dagrl.refit.strided import stack_experts
from dagrl.refit.transfers import DIRECT_BYTES, aligned
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families import find_family
from dagrl.workers.families.megatron import MegatronModules
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.unit.refit.memory_channel import copy_mapped, run_refit
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


def megatron_slices(
    config: Config, layout: ParallelLayout, modules: MegatronModules | None = None
) -> list[list[WeightSlice]]:
    return [megatron_weight_slices(config, layout, rank, modules) for rank in range(layout.world_size)]


def check_megatron_to_vllm(
    config: Config,
    layout: ParallelLayout,
    tp: int,
    replicas: int,
    bucket_bytes: int,
    *,
    modules: MegatronModules | None = None,
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
    weights, held = hf_weights(config), megatron_slices(config, layout, modules)
    sources = [megatron_tensors(weights, config, layout, rank, modules) for rank in range(layout.world_size)]
    embedding, aliases = find_family(config).names.embedding, {}
    if config["tie_word_embeddings"] and tied_head != "one tensor":
        config, aliases = dict(config, tie_word_embeddings=False), {"lm_head.weight": embedding}
        weights["lm_head.weight"] = weights[embedding]
    wanted = [vllm_weight_slices(config, rank) for rank in ranks]
    expected = [vllm_tensors(weights, config, tp, rank.tp_rank, ep) for rank in ranks]
    if aliases and tied_head == "two names":
        held = [name_again(mine, embedding, tensors) for mine, tensors in zip(held, sources, strict=True)]
    plan = plan_refit(
        held,
        wanted,
        dtype="float32",
        aliases=aliases,
        bucket_bytes=bucket_bytes,
        hosts=[rank // ranks_a_host for rank in range(size)] if ranks_a_host else None,
        direct_bytes=direct_bytes,
    )
    if dtype != torch.float32:
        kept = [{one.tensor for one in expand(slices) if one.dtype} for slices in wanted]
        expected = [
            {name: tensor if name in names else tensor.to(dtype) for name, tensor in mine.items()}
            for mine, names in zip(expected, kept, strict=True)
        ]
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
    plan = plan_refit(
        [[held(box)] for box in boxes],
        [[held(box)] for box in wanted],
        dtype="float32",
        bucket_bytes=64,
        direct_bytes=data.draw(st.sampled_from([1, 20, DIRECT_BYTES])),
    )
    sources = [{"t": whole[tuple(slice(a, b) for a, b in box)]} for box in boxes]
    built = [{"t": torch.zeros([b - a for a, b in box])} for box in wanted]
    run_refit(plan, [*sources, *built])
    assert all(
        torch.equal(ours["t"], whole[tuple(slice(a, b) for a, b in box)]) for ours, box in zip(built, wanted, strict=True)
    )


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
        WeightSlice(f"e.{number}.w", box[1:], "w", (at, *box[1:]), one.dtype, Scales("s", (at, (0, 1), (0, 2))))
        for number, at in ((5, (2, 3)), (6, (3, 4)))
    ]
    own = WeightSlice("e.*.w", box, "w.*", ((2, 4), *box[1:]))
    assert list(expand([own])) == [
        WeightSlice(f"e.{number}.w", box[1:], f"w.{at}", box[1:]) for number, at in ((5, 2), (6, 3))
    ]


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
    for sides, message in (
        ((source, lacking), "the sources have .* dest"),
        ((fewer, wanted), "the destinations have .* so"),
    ):
        with pytest.raises(RefitPlanError, match=rf"{message}\w+ lack: 'model.layers.0.self_attn.k_norm.weight'"):
            plan_refit([sides[0]], [sides[1]], dtype="float32")


ROW: Box = ((0, 2),)


@pytest.mark.parametrize(
    ("sources", "wanted", "message"),
    [
        (
            [[held(((0, 2), (0, 4)))], [held(((4, 6), (0, 4)))]],
            [held(((0, 6), (0, 4)))],
            r"'p': no source holds \(\(2, 4\), \(0, 4\)\)",
        ),
        ([[held(((0, 6),))]], [held(((0, 5),))], r"'p' is \(\(0, 6\),\) in the sources but \(\(0, 5\),\) in the dest"),
        (
            [[held(ROW), held(ROW, "q")]],
            [WeightSlice("p", ROW, "t", ROW), WeightSlice("q", ROW, "t", ((1, 3),))],
            r"\(\(1, 2\),\) of the destination tensor 't' would be written twice: by parameter 'p'",
        ),
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
