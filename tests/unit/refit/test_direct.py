"""Direct messages between tensors: which moves they contain, at which end, and that both ends split buckets alike."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dagrl.refit import RefitPlan, WeightSlice, plan_refit
from dagrl.refit.carry.endpoint import RefitRounds
from dagrl.refit.carry.pack import BucketMemory
from dagrl.refit.plan.planner import BUCKET_BYTES
from dagrl.refit.slices import Box, is_contiguous_box
from dagrl.refit.transfers import DIRECT_BYTES, Move, MoveSide, adjoin, aligned, box_of_run, split_messages
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.refit_mappings import QWEN3_4B
from tests.unit.refit.memory_channel import MemoryChannel, run_refit
from tests.unit.refit.weight_reference import (
    VllmRank,
    hf_weights,
    megatron_layouts,
    megatron_tensors,
    model_configs,
    vllm_sizes,
    vllm_tensors,
    vllm_weight_slices,
)

Pair = tuple[int, int]


def part(name: str, tensor: str, rows: Pair, columns: Pair, at: Pair = (0, 0)) -> WeightSlice:
    """`rows` and `columns` of a matrix, whose first element is at index `at` of a tensor."""
    local = tuple((start, start + stop - first) for start, (first, stop) in zip(at, (rows, columns), strict=True))
    return WeightSlice(name, (rows, columns), tensor, local)


def gated_mlp() -> tuple[RefitPlan, list[dict[str, Tensor]], Tensor, Tensor]:
    """Gate and up, 4 x 8 each, adjacent on both sides; down, 9 x 5, contiguous at the destination only; a small norm."""
    both = [("gate", (0, 0)), ("up", (4, 0))]
    source = [*(part(name, "fc1", (0, 4), (0, 8), at) for name, at in both), part("down", "fc2", (0, 9), (0, 10))]
    source += [part(name, name, (0, 1), (0, 5)) for name in ("norm", "bias")]
    target = [part(name, "gate_up", (0, 4), (0, 8), at) for name, at in both]
    target += [part("down", name, (0, 9), columns) for name, columns in (("down", (0, 5)), ("other", (5, 10)))]
    target += [part(name, name[0], (0, 1), (0, 5)) for name in ("norm", "bias")]
    plan = plan_refit([source], [target], dtype="float32", direct_bytes=128)
    held = {"fc1": torch.randn(8, 8), "fc2": torch.randn(9, 10), "norm": torch.randn(1, 5), "bias": torch.randn(1, 5)}
    shapes = {"gate_up": (8, 8), "down": (9, 5), "other": (9, 5), "n": (1, 5), "b": (1, 5)}
    return plan, [held, {name: torch.zeros(shape) for name, shape in shapes.items()}], held["fc1"], held["fc2"]


def memories(plan: RefitPlan, rank: int, tensors: dict[str, Tensor]) -> list[BucketMemory]:
    bound = RefitRounds(plan.for_rank(rank), tensors, MemoryChannel(rank, plan.size, {}))
    return bound.sends or bound.receives


def test_runs_are_direct_and_the_rest_share_a_message() -> None:
    plan, tensors, fc1, fc2 = gated_mlp()
    [sent], [came] = (memories(plan, rank, tensors[rank]) for rank in range(2))
    names = [[move.name for move in message.moves] for message in sent.bucket.messages]
    assert names == [["gate", "up"], ["down"], ["down"], ["norm", "bias"]]
    assert sent.messages[0].data_ptr() == fc1.data_ptr() and came.messages[0].data_ptr() == tensors[1]["gate_up"].data_ptr()
    assert [came.messages[i].data_ptr() for i in (1, 2)] == [tensors[1][name].data_ptr() for name in ("down", "other")]
    small = 32 + 20  # two vectors of 20 bytes, the second at a multiple of 16
    columns = 192  # 180 bytes of `fc2` each, which are packed
    assert sent.staged_bytes == 2 * columns + 64 and came.staged_bytes == 64 >= small
    [bucket] = plan.buckets
    assert (bucket.packed, bucket.unpacked) == (sent.staged_bytes, came.staged_bytes)
    assert plan.summary().staging_bytes == 2 * sent.staged_bytes
    run_refit(plan, tensors)
    assert torch.equal(tensors[1]["gate_up"], fc1)
    assert torch.equal(torch.cat([tensors[1]["down"], tensors[1]["other"]], 1), fc2)


def test_only_the_end_with_a_gap_in_its_tensor_stages() -> None:
    plan, tensors, fc1, _ = gated_mlp()
    tensors[1]["gate_up"] = torch.zeros(8, 16)[:, ::2]
    tensors[1]["down"] = torch.zeros(9, 5, dtype=torch.bfloat16)
    [sent], [came] = (memories(plan, rank, tensors[rank]) for rank in range(2))
    assert sent.messages[0].data_ptr() == fc1.data_ptr()
    assert came.staged_bytes == 256 + 192 + 64
    assert [message.nbytes for message in sent.messages] == [message.nbytes for message in came.messages]
    run_refit(plan, tensors, verify="checksum")
    assert torch.equal(tensors[1]["gate_up"], fc1)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_both_ends_split_alike_and_stage_what_was_planned(data: st.DataObject) -> None:
    config = data.draw(model_configs())
    layout, tp = data.draw(megatron_layouts(config)), data.draw(st.sampled_from(vllm_sizes(config)))
    held = [megatron_weight_slices(config, layout, rank) for rank in range(layout.world_size)]
    wanted = [vllm_weight_slices(config, VllmRank(tp, rank)) for rank in range(tp)]
    size = data.draw(st.sampled_from([500, 4000, 1 << 20]))
    direct = data.draw(st.sampled_from([16, 300, 2000]))
    plan = plan_refit(held, wanted, dtype="float32", bucket_bytes=size, direct_bytes=direct)
    weights = hf_weights(config)
    tensors = [megatron_tensors(weights, config, layout, rank) for rank in range(layout.world_size)]
    tensors += [vllm_tensors(weights, config, tp, rank) for rank in range(tp)]
    ends: dict[tuple[int, int], list[list[int]]] = {}
    for rank, held_here in enumerate(tensors):
        live = {name: tensor.contiguous() for name, tensor in held_here.items()}
        bound = RefitRounds(plan.for_rank(rank), live, MemoryChannel(rank, plan.size, {}))
        for memory in (*bound.sends, *bound.receives):
            bucket = memory.bucket
            ends.setdefault((bucket.round, bucket.source), []).append([message.nbytes for message in memory.messages])
            planned = next(one for one in plan.buckets if (one.round, one.source) == (bucket.round, bucket.source))
            expected = planned.packed if memory.side == "source" else planned.unpacked
            last = bucket.messages[-1]  # of the small moves; it is direct if they form one run
            spared = aligned(last.nbytes) if box_of_run(last.moves, memory.side) else 0
            assert memory.staged_bytes in (expected, expected - spared)
            assert sum(move.nbytes for move in bucket.moves) == bucket.nbytes == planned.nbytes
            assert memory.staged_bytes <= size or len(planned.groups) == 1
    assert all(len(both) == 2 and both[0] == both[1] for both in ends.values())


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    edges = [st.tuples(st.integers(0, size), st.integers(0, size)).filter(lambda pair: pair[0] < pair[1]) for size in shape]
    return st.tuples(*edges)


@given(st.data())
def test_contiguity_agrees_with_torch(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    local = data.draw(boxes_of(shape))
    assert is_contiguous_box("t", local, {"t": shape}) == cut(torch.zeros(shape), local).is_contiguous()


def cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*edges) for edges in box)]


def rows(first: int, stop: int, width: tuple[int, int] = (0, 4), **changes: str) -> Move:
    box = ((first, stop), width)
    return replace(Move("p", box, "float32", "s", box, "t", box), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (rows(0, 2), rows(2, 3), True),
        (rows(1, 2, (0, 4)), rows(1, 2, (4, 8)), True),
        (rows(0, 2, (0, 4)), rows(0, 2, (4, 8)), False),
        (rows(2, 3), rows(0, 2), False),
        (rows(0, 2, (0, 3)), rows(2, 4, (0, 3)), False),  # 24 bytes: in a message the next move starts 8 bytes later
        *((rows(0, 2), rows(2, 3, **{key: "other"}), False) for key in ("dtype", "source", "target")),
        *((rows(0, 2), second, False) for second in (rows(3, 4), rows(2, 3, (0, 8)), rows(2, 3, (4, 8)))),
    ],
)
def test_moves_join_if_adjacent_in_both_tensors_and_the_message(first: Move, second: Move, together: bool) -> None:
    assert adjoin(first, second) == together


@given(st.data())
def test_a_contiguous_run_has_the_bytes_of_its_moves(data: st.DataObject) -> None:
    """Mostly adjacent boxes of a 3-d tensor: if a run is contiguous, its bytes are those of its moves."""
    shape = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
    tensor = torch.arange(4 * shape[0] * shape[1] * shape[2], dtype=torch.float32).view(*shape[:2], -1)
    boxes = [data.draw(boxes_of(shape))]
    for _ in range(data.draw(st.integers(1, 3))):
        dim = data.draw(st.integers(0, 2))
        start = boxes[-1][dim][1]
        if start < shape[dim]:
            stop = data.draw(st.integers(start + 1, shape[dim]))
            boxes.append((*boxes[-1][:dim], (start, stop), *boxes[-1][dim + 1 :]))
    moves = []
    for box in boxes:
        elements = tuple((4 * start, 4 * stop) if dim == 2 else (start, stop) for dim, (start, stop) in enumerate(box))
        moves.append(Move("p", elements, "float32", "s", elements, "t", elements))
    sides: tuple[MoveSide, MoveSide] = ("source", "target")
    large, small = split_messages(moves, 1)
    assert not small and [move for message in large for move in message.moves] == moves
    for message in large:
        for side in sides:
            run = box_of_run(message.moves, side)
            if run is not None and is_contiguous_box(*run, {"s": tuple(tensor.shape), "t": tuple(tensor.shape)}):
                parts = torch.cat([cut(tensor, move.box).flatten() for move in message.moves])
                assert torch.equal(cut(tensor, run[1]).flatten(), parts)
                assert message.nbytes == parts.nbytes


def real_plan(ranks: int, layout: ParallelLayout, **options: int) -> RefitPlan:
    held = [megatron_weight_slices(QWEN3_4B, layout, rank) for rank in range(ranks)]
    wanted = [vllm_weight_slices(QWEN3_4B, VllmRank(ranks, rank)) for rank in range(ranks)]
    return plan_refit(held, wanted, dtype="bfloat16", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "packed"), [("tp", 0.24), ("pp", 0.46), ("dp", 0.46)])
def test_most_of_a_real_model_is_direct(kind: str, packed: float) -> None:
    """Except QKV, whose groups are interleaved, and the small o_proj. Columns of down_proj are packed but not unpacked."""
    plan = real_plan(2, ParallelLayout(**{kind: 2}), direct_bytes=DIRECT_BYTES)
    total = sum(bucket.nbytes for bucket in plan.buckets)
    assert sum(bucket.packed for bucket in plan.buckets) < packed * total
    assert sum(bucket.unpacked for bucket in plan.buckets) < 0.24 * total
    for bucket in (one for rank in range(2) for one in plan.for_rank(rank).sends):
        *large, _ = bucket.messages
        assert all(message.nbytes >= DIRECT_BYTES for message in large)


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_between_two_ranks_is_a_bucket_a_group_of_messages(ranks: int) -> None:
    """Between more ranks NCCL uses half of its channels for smaller messages."""
    plan = real_plan(ranks, ParallelLayout(tp=ranks))
    messages = [len(bucket.messages) for rank in range(ranks) for bucket in plan.for_rank(rank).sends]
    assert (max(messages) == 1) == (ranks == 2)
    if ranks == 2:  # a part of the embedding fills a bucket and is direct
        assert max(bucket.nbytes for bucket in plan.buckets) <= BUCKET_BYTES[1]
        assert any(not bucket.packed and not bucket.unpacked for bucket in plan.buckets)


@pytest.mark.parametrize("named", [False, True])
def test_staging_of_casts_is_bounded(named: bool) -> None:
    """4 GB of float32 matrices that generation holds in bfloat16, declared by slice or for all tensors."""
    whole, numbers = ((0, 1024), (0, 4096)), range(256)
    held = [WeightSlice(f"w{number}", whole, f"w{number}", whole) for number in numbers]
    wanted = [WeightSlice(one.name, whole, one.tensor, whole, "bfloat16" if named else "") for one in held]
    plan = plan_refit([held], [wanted], dtype="float32", target_dtype=None if named else "bfloat16")
    tensors = {
        dtype: {one.tensor: torch.empty(1024, 4096, dtype=dtype, device="meta") for one in held}
        for dtype in (torch.float32, torch.bfloat16)
    }
    sends = [BucketMemory(bucket, tensors[torch.float32], "source") for bucket in plan.for_rank(0).sends]
    receives = [BucketMemory(bucket, tensors[torch.bfloat16], "target") for bucket in plan.for_rank(1).receives]
    assert {memory.staged_bytes for memory in sends} == {0}
    assert [memory.staged_bytes for memory in receives] == [bucket.unpacked for bucket in plan.buckets]
    assert {memory.staged_bytes for memory in receives} == {BUCKET_BYTES[1]}
    assert plan.summary().staging_bytes == 2 * BUCKET_BYTES[1]


def test_staging_of_packed_parts_is_bounded() -> None:
    """A source holds two matrices next to each other in one tensor."""
    whole, halves = ((0, 1024), (0, 4096)), (((0, 1024), (0, 4096)), ((0, 1024), (4096, 8192)))
    wanted = [WeightSlice(f"w{number}", whole, f"w{number}", whole) for number in range(256)]
    held = [WeightSlice(one.name, whole, f"pair{number // 2}", halves[number % 2]) for number, one in enumerate(wanted)]
    plan = plan_refit([held], [wanted], dtype="float32")
    assert {(bucket.packed, bucket.unpacked) for bucket in plan.buckets} == {(BUCKET_BYTES[1], 0)}
