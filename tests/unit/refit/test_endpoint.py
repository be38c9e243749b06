"""Replaying a refit: packing, direct messages, casts, and errors before any byte is sent."""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from queue import Queue
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dagrl.channels import ChannelSpec, open_channel
from dagrl.channels.spec import ChannelKind
from dagrl.errors import ChannelError, MissingDependencyError, RefitPlanError, RunError
from dagrl.refit import RefitPlan, RefitReport, Verify, WeightSlice, commit_together, merge_reports, plan_refit
from dagrl.refit.carry.endpoint import RefitReceiver, RefitRounds, RefitSender
from dagrl.refit.carry.pack import BucketMemory, bind_staging
from dagrl.refit.kernels.batched import BatchedCopy
from dagrl.refit.plan.planner import BUCKET_BYTES
from dagrl.refit.slices import Box, Scales, expand, is_contiguous_box
from dagrl.refit.transfers import DIRECT_BYTES, Move, MoveSide, adjoin, aligned, box_of_run, split_messages
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.refit_mappings import QWEN3_4B
from tests.unit.refit import weight_reference as reference
from tests.unit.refit.fp8_reference import cuts_a_block, fp8_configs, fp8_tensors, quantized_model, random_weights
from tests.unit.refit.memory_channel import Done, MemoryChannel, Pair, Queues, copy_mapped, run_refit

WHOLE: Box = ((0, 6), (0, 10))


def matrix(tensor: str = "t", box: Box = WHOLE, local: Box | None = None) -> WeightSlice:
    return WeightSlice("p", box, tensor, local or tuple((0, stop - start) for start, stop in box))


def plan_of(*wanted: WeightSlice, dtype: str = "float32", bucket_bytes: int = 1 << 20) -> RefitPlan:
    return plan_refit([[matrix("s")]], [list(wanted)], dtype=dtype, bucket_bytes=bucket_bytes)


def source(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(60, dtype=dtype).view(6, 10)


def columns() -> tuple[WeightSlice, WeightSlice]:
    """The left and right halves, stacked in one tensor with a leading dimension."""
    left = WeightSlice("p", ((0, 6), (0, 5)), "t", ((1, 2), (0, 6), (0, 5)))
    return left, WeightSlice("p", ((0, 6), (5, 10)), "t", ((0, 1), (0, 6), (0, 5)))


def rounds(plan: RefitPlan, rank: int, tensors: dict[str, Tensor], kind: ChannelKind = "gloo") -> RefitRounds:
    channel = MemoryChannel(rank, 2, {})
    channel.spec = replace(channel.spec, kind=kind)
    return RefitRounds(plan.for_rank(rank), tensors, channel)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8", "int64"])
def test_strided_parts_are_written_into_a_stacked_tensor(dtype: str, bucket_bytes: int) -> None:
    kind = getattr(torch, dtype)
    target = torch.zeros(2, 6, 5, dtype=kind)
    run_refit(plan_of(*columns(), dtype=dtype, bucket_bytes=bucket_bytes), [{"s": source(kind)}, {"t": target}])
    assert torch.equal(target, torch.stack([source(kind)[:, 5:], source(kind)[:, :5]]))


def test_live_parameters_and_inference_tensors_are_written_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, 10))
    with torch.inference_mode():
        frozen = torch.zeros(6, 10)
    for target in (parameter, frozen):
        run_refit(plan_of(matrix()), [{"s": torch.nn.Parameter(source())}, {"t": target}])
        assert torch.equal(target, source())
        rows = [((row, row + 1), (0, 10)) for row in range(6)]
        plan = plan_of(*(matrix(box=box, local=box) for box in rows))
        run_refit(plan, [{"s": torch.nn.Parameter(source() + 1)}, {"t": target}])
        assert torch.equal(target, source() + 1)


def whole(name: str, tensor: Tensor) -> WeightSlice:
    box = tuple((0, size) for size in tensor.shape)
    return WeightSlice(name, box, name, box, str(tensor.dtype).removeprefix("torch."))


@pytest.mark.parametrize("verify", ["off", "checksum"])
@pytest.mark.parametrize("direct_bytes", [1, 1 << 20], ids=["direct", "staged"])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=["same dtype", "cast"])
def test_scalars_are_sent_with_matrices(verify: Verify, direct_bytes: int, held: torch.dtype) -> None:
    sent = {"scale": torch.tensor(2.5), "w": source(), "count": torch.tensor(7), "byte": torch.tensor(3, dtype=torch.uint8)}
    sent |= {"odd": torch.arange(3).bfloat16(), "wide": torch.arange(3).double()}  # messages that end inside a word
    got = {name: torch.zeros_like(one, dtype=held if one.is_floating_point() else None) for name, one in sent.items()}
    sides = [[[whole(*item) for item in tensors.items()]] for tensors in (sent, got)]
    plan = plan_refit(*sides, dtype="float32", direct_bytes=direct_bytes)
    run_refit(plan, [sent, got], verify=verify)
    assert all(torch.equal(one, sent[name].to(one.dtype)) for name, one in got.items())


def test_a_parameter_without_elements_is_not_sent() -> None:
    sent, got = ({"none": torch.zeros(0, 4), "w": fill(6, 10)} for fill in (torch.ones, torch.zeros))
    plan = plan_refit(*([[whole(*item) for item in tensors.items()]] for tensors in (sent, got)), dtype="float32")
    run_refit(plan, [sent, got], verify="checksum")
    assert torch.equal(got["w"], sent["w"])
    assert {move.name for bucket in plan.for_rank(0).sends for move in bucket.moves} == {"w"}
    nothing = WeightSlice("p", ((0, 6), (10, 10)), "t", ((0, 6), (0, 0)))  # on a rank that holds none of it
    plan = plan_refit([[matrix("s")]], [[matrix()], [nothing]], dtype="float32")
    assert plan.for_rank(1).receives and not plan.for_rank(2).receives


def test_large_whole_parts_are_first_and_last_and_not_staged() -> None:
    """A table of 480 bytes in two buckets of whole rows, before and after four small matrices that must be packed."""
    table = WeightSlice("embed", ((0, 12), (0, 10)), "e", ((0, 12), (0, 10)))
    others = [WeightSlice(f"p{i}", ((0, 6), (0, 5)), f"t{i}", ((0, 6), (0, 5))) for i in range(4)]
    plan = plan_refit([[*others, table]], [[*others, table]], dtype="float32", bucket_bytes=300)
    tensors = {one.tensor: torch.zeros([stop for _, stop in one.local]) for one in (*others, table)}
    for rank in range(2):
        bound = rounds(plan, rank, tensors)
        memories = bound.sends or bound.receives
        assert [memory.staged_bytes == 0 for memory in memories] == [True, False, False, True]
        assert [memory.bucket.nbytes for memory in memories] == [240, 240, 240, 240]


@pytest.mark.parametrize(("kind", "beside"), [("nccl", True), ("ipc", False)])
def test_only_the_first_pack_and_the_last_unpack_use_the_whole_gpu(kind: ChannelKind, beside: bool) -> None:
    """If messages are not kernels, no bucket shares the GPU with them."""
    plan = plan_of(*columns(), bucket_bytes=64)
    sent = rounds(plan, 0, {"s": source()}, kind).sends
    received = rounds(plan, 1, {"t": torch.zeros(2, 6, 5)}, kind).receives
    others = [not beside] * 3
    assert [memory.alone for memory in sent] == [True, *others]
    assert [memory.alone for memory in received] == [*others, True]


def test_a_bucket_is_packed_while_the_previous_one_is_sent() -> None:
    events: list[str] = []

    class Channel(MemoryChannel):
        def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Any:
            number = sum(event.startswith("post") for event in events)
            events.append(f"post {number}")
            return [Mock(wait=lambda: events.append(f"wait {number}"))]

    plan = plan_of(*columns(), bucket_bytes=64)
    bound = RefitRounds(plan.for_rank(0), {"s": source()}, Channel(0, 2, {}))
    bound.run(lambda memory: events.append("packed"), lambda memory: None)
    begun = ["packed", "post 0", "packed", "post 1"]  # and no more, as staging holds two buckets
    assert events == [*begun, "wait 0", "packed", "post 2", "wait 1", "packed", "post 3", "wait 2", "wait 3"]


@pytest.mark.parametrize(
    ("end", "dtype", "tensors", "words"),
    [
        (RefitSender, "float32", {}, "the plan needs the tensor 's', but this worker has"),
        (RefitSender, "float32", {"s": torch.zeros(6, 9)}, r"its shape is \(6, 9\)"),
        (RefitSender, "float32", {"s": torch.zeros(60)}, r"its shape is \(60,\)"),
        (RefitSender, "float32", {"s": source(torch.bfloat16)}, "is torch.bfloat16, but the plan was made for float32"),
        *(
            (RefitReceiver, sent, {"t": source().to(held)}, f"'p' is received as {sent} and cannot be cast to the {held}")
            for sent, held in (("float32", torch.int64), ("int64", torch.float32), ("bfloat16", torch.float8_e4m3fn))
        ),
    ],
)
def test_tensors_that_do_not_fit_the_plan(end: Any, dtype: str, tensors: dict[str, Tensor], words: str) -> None:
    rank = int(end is RefitReceiver)
    with pytest.raises(RefitPlanError, match=words):
        end(plan_of(matrix(), dtype=dtype).for_rank(rank), tensors, MemoryChannel(rank, 2, {}))


@pytest.mark.parametrize("verify", ["off", "checksum"])
def test_a_source_wider_than_the_plan_is_cast_as_it_is_packed(verify: Verify) -> None:
    sent, held = torch.nn.Parameter(torch.randn(6, 10)), torch.zeros(2, 6, 5, dtype=torch.bfloat16)
    ends = Pair(plan_of(*columns(), dtype="bfloat16", bucket_bytes=64), {"s": sent}, {"t": held}, verify)
    for version in range(2):
        sent.data += version
        ends.refit(version)
        assert torch.equal(held, torch.stack([sent[:, 5:], sent[:, :5]]).bfloat16())
    held.zero_()
    copy_mapped(plan_of(*columns(), dtype="bfloat16"), [{"s": sent}, {"t": held}])
    assert torch.equal(held, torch.stack([sent[:, 5:], sent[:, :5]]).bfloat16())


def test_a_tensor_with_new_memory_is_bound_again() -> None:
    sent, held = torch.nn.Parameter(source()), torch.nn.Parameter(torch.zeros(2, 6, 5))
    ends = Pair(plan_of(*columns(), bucket_bytes=64), {"s": sent}, {"t": held})
    for version in range(4):
        if version > 1:
            sent.data, held.data = source() * version, torch.zeros(2, 6, 5)
        ends.refit(version)
        assert torch.equal(held, torch.stack([sent[:, 5:], sent[:, :5]]))


def test_scales_with_new_memory_are_bound_again() -> None:
    """The FP8 weight itself does not move."""
    box: Box = ((0, 128), (0, 256))
    wanted = WeightSlice("p", box, "t", box, "float8_e4m3fn", Scales("s", ((0, 1), (0, 2))))
    plan = plan_refit([[WeightSlice("p", box, "t", box)]], [[wanted]], dtype="float32")
    weights, scales = torch.full((128, 256), 448.0), torch.nn.Parameter(torch.zeros(1, 2))
    ends = Pair(plan, {"t": weights}, {"t": torch.zeros(128, 256, dtype=torch.float8_e4m3fn), "s": scales})
    for version in (1, 2):
        scales.data = torch.zeros(1, 2)
        weights.mul_(version)
        ends.refit(version)
        assert scales.tolist() == [[version, version]]


def test_old_staging_is_freed_before_moved_tensors_are_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    sent = torch.nn.Parameter(source())
    sender = RefitSender(plan_of(*columns(), bucket_bytes=64).for_rank(0), {"s": sent}, MemoryChannel(0, 2, queues))
    before = [weakref.ref(message) for memory in sender.rounds.sends for message in memory.messages]
    there: list[int] = []

    def bind(memories: list[BucketMemory]) -> int:
        there.append(sum(message() is not None for message in before))
        return bind_staging(memories)

    monkeypatch.setattr("dagrl.refit.carry.endpoint.bind_staging", bind)
    sender.send(1)
    assert before[0]() is not None and not there
    sent.data = source()
    sender.send(2)
    assert len(before) == 4 and set(there) == {0}


def test_a_tensor_that_no_longer_fits_is_rejected_until_it_fits() -> None:
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    sent, first = torch.nn.Parameter(source()), source()
    sent.data = first
    sender = RefitSender(plan_of(matrix()).for_rank(0), {"s": sent}, MemoryChannel(0, 2, queues))
    for _ in range(2):
        sent.data = torch.zeros(3, 3)
        with pytest.raises(RefitPlanError, match=r"its shape is \(3, 3\)"):
            sender.send(1)
    sent.data = first  # the memory it was bound to first
    sender.send(2)
    *_, message = queues[0, 1].queue
    assert torch.equal(message.view(torch.float32), first.flatten())


@pytest.mark.parametrize("moved", [False, True], ids=["first", "moved"])
def test_copies_are_prepared_before_the_first_message(moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs this uploads tables, which would otherwise wait for messages without the channel's deadline."""
    events: list[str] = []

    class Channel(MemoryChannel):
        def receive(self, tensor: Tensor, peer: int) -> Done:
            events.append("header" if tensor.dtype == torch.int64 and tensor.numel() == 3 else "message")
            return super().receive(tensor, peer)

        def synchronize(self) -> None:
            events.append("synchronized")

    class Copy(BatchedCopy):
        def __init__(self, *sides: list[Tensor]) -> None:
            events.append("copy")
            super().__init__(*sides)

    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    plan = plan_of(*columns())
    held = torch.nn.Parameter(torch.zeros(2, 6, 5))
    monkeypatch.setattr("dagrl.refit.carry.pack.BatchedCopy", Copy)
    receiver = RefitReceiver(plan.for_rank(1, "checksum"), {"t": held}, Channel(1, 2, queues))
    assert events == ["copy"]
    if moved:
        held.data = torch.zeros(2, 6, 5)
    events.clear()
    RefitSender(plan.for_rank(0, "checksum"), {"s": source()}, MemoryChannel(0, 2, queues)).send(1)
    ours = len(events)
    receiver.receive(1)
    received = events[ours:]
    assert received[: received.index("message")] == [*(["copy"] if moved else []), "header", "synchronized"]
    assert "copy" not in received[received.index("message") :]


@pytest.mark.parametrize(
    ("bucket_bytes", "version", "words"),
    [
        (128, 1, "rank 0 has another refit plan"),
        (64, 6, "rank 0 sends version 1, but this rank receives version 6; replay one version on all ranks"),
    ],
)
def test_another_plan_or_version_is_rejected_before_a_byte_is_written(bucket_bytes: int, version: int, words: str) -> None:
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    RefitSender(plan_of(*columns(), bucket_bytes=64).for_rank(0), {"s": source()}, MemoryChannel(0, 2, queues)).send(1)
    target, plan = torch.zeros(2, 6, 5), plan_of(*columns(), bucket_bytes=bucket_bytes)
    with pytest.raises(ChannelError, match=words):
        RefitReceiver(plan.for_rank(1), {"t": target}, MemoryChannel(1, 2, queues)).receive(version)
    assert not target.any()


@pytest.mark.parametrize(
    "error", [ChannelError("no memory"), RefitPlanError("it moved"), ValueError("x"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_error_of_one_rank_breaks_its_channel(error: BaseException, at_the_end: bool) -> None:
    """Includes errors while memory is freed. Peers stop waiting for messages at once."""
    channel = RecordingChannel(0, 2, {})
    if at_the_end:
        channel.at_release = error
    with pytest.raises(type(error)), commit_together(channel, wait=True):
        if not at_the_end:
            raise error
    assert channel.told == [("abort", f"{type(error).__name__}: {error}")]


@pytest.mark.parametrize("wait", [False, True])
def test_a_finished_part_releases_memory_and_votes(wait: bool) -> None:
    """A RunError after the last message is a refusal, and keeps the channel."""
    channel, vote = RecordingChannel(0, 2, {}), "agree and wait" if wait else "agree"
    with commit_together(channel, wait=wait):
        assert not channel.told
    with pytest.raises(RunError), commit_together(channel, wait=wait):
        raise RunError("p is not what rank 0 sent")
    assert channel.told == [("release", ""), (vote, ""), ("agree and wait", "RunError: p is not what rank 0 sent")]


class RecordingChannel(MemoryChannel):
    """Records what it is told; `release` raises `at_release`."""

    def __init__(self, rank: int, size: int, queues: Queues) -> None:
        super().__init__(rank, size, queues)
        self.told: list[tuple[str, str]] = []
        self.at_release: BaseException | None = None

    def abort(self, reason: str) -> None:
        self.told.append(("abort", reason))

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        self.told.append(("agree and wait" if wait else "agree", refusal))

    def release(self) -> None:
        if self.at_release is not None:
            raise self.at_release
        self.told.append(("release", ""))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        self.told.append(("guarded", ""))
        yield
        self.told.append(("unguarded", ""))

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Done]:
        self.told.append(("post", ""))
        return super().exchange(sends, receives)


def test_rounds_run_inside_the_deadline() -> None:
    """A stuck GPU also blocks launches and stream waits on the host. The header is a single message."""
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    channel = RecordingChannel(0, 2, queues)
    sender = RefitSender(plan_of(matrix()).for_rank(0), {"s": source()}, channel)
    for version in (1, 2):
        sender.send(version)
    assert [told for told, _ in channel.told] == ["post", "guarded", "post", "unguarded"] * 2


def test_reports_merge() -> None:
    parts = [RefitReport(3, 10, 0, 0.5), RefitReport(3, 0, 10, 0.7, 0.9)]
    assert merge_reports(parts) == RefitReport(3, 10, 10, 0.7, 0.9)
    assert merge_reports([merge_reports(parts[:1]), parts[1]]) == merge_reports(parts)
    with pytest.raises(RunError, match=r"versions \[3, 4\]"):
        merge_reports([parts[0], RefitReport(4, 0, 0, 0.0)])


@pytest.mark.skipif(find_spec("cupy") is not None, reason="cupy is installed")
def test_an_nccl_channel_without_cupy_names_the_extra() -> None:
    with pytest.raises(MissingDependencyError, match=r"dagrl\[cu13\]"):
        open_channel(ChannelSpec("nccl", "127.0.0.1:1", 0, 1))


FP8 = torch.float8_e4m3fn
Slices = list[list[WeightSlice]]


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_megatron_layout_into_any_engine_in_fp8(data: st.DataObject) -> None:
    """Equals the whole model's quantization bit for bit; rejected exactly if a shard of either side splits a block."""
    config, dtype = data.draw(fp8_configs()), data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    whole = random_weights(config, dtype)
    for _ in range(data.draw(st.sampled_from([6, 6, 6, 1]))):  # usually until one fits
        layout = data.draw(reference.megatron_layouts(config, limit=4))
        tp, ep = data.draw(st.sampled_from(reference.vllm_sizes(config)[::-1])), data.draw(st.booleans())
        held = [megatron_weight_slices(config, layout, rank) for rank in range(layout.world_size)]
        fits = not is_cut(whole, config, held, tp, ep)
        if fits:
            break
    ranks = [reference.VllmRank(tp, rank, expert_parallel=ep, fp8=True) for rank in range(tp)] * data.draw(st.integers(1, 2))
    size, in_host = layout.world_size + len(ranks), data.draw(st.sampled_from([1, 2, 8]))
    options = {"bucket_bytes": data.draw(st.sampled_from([40_000, 1 << 20]))}
    options |= {"dtype": str(dtype).removeprefix("torch."), "hosts": [rank // in_host for rank in range(size)]}
    if not fits:
        with pytest.raises(RefitPlanError, match="inside an FP8 block"):
            plan_refit(held, [reference.vllm_weight_slices(config, rank) for rank in ranks], **options)
        return
    wanted = [reference.vllm_weight_slices(config, rank) for rank in ranks]
    plan = plan_refit(held, wanted, **options)
    sources = [reference.megatron_tensors(whole, config, layout, rank) for rank in range(layout.world_size)]
    model = quantized_model(whole)
    expected = [expected_on(rank, model, config, mine, dtype) for rank, mine in zip(ranks, wanted, strict=True)]
    built = [{name: empty_like(tensor) for name, tensor in tensors.items()} for tensors in expected]
    if data.draw(st.booleans()) and all(bucket.source < plan.sources for bucket in plan.buckets):
        copy_mapped(plan, [*sources, *built])
    else:
        run_refit(plan, [*sources, *built], verify=data.draw(st.sampled_from(["off", "checksum"])))
    for ours, theirs in zip(built, expected, strict=True):
        assert [name for name in theirs if not torch.equal(as_stored(ours[name]), theirs[name])] == []


def is_cut(whole: reference.Weights, config: reference.Config, held: Slices, tp: int, ep: bool) -> bool:
    """Returns whether a shard of either side splits a block."""
    plain = [reference.vllm_weight_slices(config, reference.VllmRank(tp, rank, expert_parallel=ep)) for rank in range(tp)]
    sides = ((held, False), (plain, True))
    return any(cuts_a_block(whole, mine, local) for ranks, local in sides for mine in ranks)


def expected_on(
    rank: reference.VllmRank,
    model: tuple[reference.Weights, reference.Weights],
    config: reference.Config,
    slices: list[WeightSlice],
    dtype: torch.dtype,
) -> reference.Weights:
    """The tensors that vLLM holds. Unquantized ones have the engine's dtype, or the one in their slices."""
    tensors = fp8_tensors(model, config, rank.tp, rank.tp_rank, rank.expert_parallel)
    kept = {one.tensor for one in expand(slices) if one.dtype}
    for name, tensor in tensors.items():
        if name not in kept and not name.endswith("_scale_inv"):
            tensors[name] = tensor.to(dtype)
    return tensors


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocates an engine's memory for the tensors of `fp8_tensors`."""
    zeros = torch.zeros_like(tensor)
    return zeros.view(FP8) if tensor.dtype == torch.uint8 else zeros


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


# Direct messages between tensors: which moves they contain, at which end, and that both ends split buckets alike.


Extent = tuple[int, int]


def part(name: str, tensor: str, rows: Extent, columns: Extent, at: Extent = (0, 0)) -> WeightSlice:
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
    config = data.draw(reference.model_configs())
    layout, tp = data.draw(reference.megatron_layouts(config)), data.draw(st.sampled_from(reference.vllm_sizes(config)))
    held = [megatron_weight_slices(config, layout, rank) for rank in range(layout.world_size)]
    wanted = [reference.vllm_weight_slices(config, reference.VllmRank(tp, rank)) for rank in range(tp)]
    size = data.draw(st.sampled_from([500, 4000, 1 << 20]))
    direct = data.draw(st.sampled_from([16, 300, 2000]))
    plan = plan_refit(held, wanted, dtype="float32", bucket_bytes=size, direct_bytes=direct)
    weights = reference.hf_weights(config)
    tensors = [reference.megatron_tensors(weights, config, layout, rank) for rank in range(layout.world_size)]
    tensors += [reference.vllm_tensors(weights, config, tp, rank) for rank in range(tp)]
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
    wanted = [reference.vllm_weight_slices(QWEN3_4B, reference.VllmRank(ranks, rank)) for rank in range(ranks)]
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
