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
from dagrl.refit import (
    RefitPlan,
    RefitReceiver,
    RefitReport,
    RefitSender,
    Verify,
    WeightSlice,
    commit_together,
    merge_reports,
    plan_refit,
)
from dagrl.refit.carry.endpoint import RefitRounds
from dagrl.refit.carry.pack import BucketMemory, bind_staging
from dagrl.refit.kernels.batched import BatchedCopy
from dagrl.refit.slices import Box, Scales, expand
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.unit.refit.fp8_reference import cuts_a_block, fp8_configs, fp8_tensors, quantized_model, random_weights
from tests.unit.refit.memory_channel import Done, MemoryChannel, Pair, Queues, copy_mapped, run_refit
from tests.unit.refit.weight_reference import (
    Config,
    VllmRank,
    Weights,
    megatron_layouts,
    megatron_tensors,
    vllm_sizes,
    vllm_weight_slices,
)

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
    ("tensors", "words"),
    [
        ({}, "the plan needs the tensor 's', but this worker has"),
        ({"s": torch.zeros(6, 9)}, r"its shape is \(6, 9\)"),
        ({"s": torch.zeros(60)}, r"its shape is \(60,\)"),
        ({"s": torch.zeros(6, 10, dtype=torch.bfloat16)}, "is torch.bfloat16, but the plan was made for float32"),
    ],
)
def test_a_source_that_does_not_fit_the_plan(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(RefitPlanError, match=words):
        RefitSender(plan_of(matrix()).for_rank(0), tensors, MemoryChannel(0, 2, {}))


@pytest.mark.parametrize(
    ("sent", "held"), [("float32", torch.int64), ("int64", torch.float32), ("bfloat16", torch.float8_e4m3fn)]
)
def test_dtypes_that_cannot_be_cast(sent: str, held: torch.dtype) -> None:
    target = {"t": torch.zeros(6, 10, dtype=held)}
    with pytest.raises(RefitPlanError, match=f"'p' is received as {sent} and cannot be cast to the {held}"):
        RefitReceiver(plan_of(matrix(), dtype=sent).for_rank(1), target, MemoryChannel(1, 2, {}))


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
        layout = data.draw(megatron_layouts(config, limit=4))
        tp, ep = data.draw(st.sampled_from(vllm_sizes(config)[::-1])), data.draw(st.booleans())
        held = [megatron_weight_slices(config, layout, rank) for rank in range(layout.world_size)]
        fits = not is_cut(whole, config, held, tp, ep)
        if fits:
            break
    ranks = [VllmRank(tp, rank, expert_parallel=ep, fp8=True) for rank in range(tp)] * data.draw(st.integers(1, 2))
    size, in_host = layout.world_size + len(ranks), data.draw(st.sampled_from([1, 2, 8]))
    options = {"bucket_bytes": data.draw(st.sampled_from([40_000, 1 << 20]))}
    options |= {"dtype": str(dtype).removeprefix("torch."), "hosts": [rank // in_host for rank in range(size)]}
    if not fits:
        with pytest.raises(RefitPlanError, match="inside an FP8 block"):
            plan_refit(held, [vllm_weight_slices(config, rank) for rank in ranks], **options)
        return
    wanted = [vllm_weight_slices(config, rank) for rank in ranks]
    plan = plan_refit(held, wanted, **options)
    sources = [megatron_tensors(whole, config, layout, rank) for rank in range(layout.world_size)]
    model = quantized_model(whole)
    expected = [expected_on(rank, model, config, mine, dtype) for rank, mine in zip(ranks, wanted, strict=True)]
    built = [{name: empty_like(tensor) for name, tensor in tensors.items()} for tensors in expected]
    if data.draw(st.booleans()) and all(bucket.source < plan.sources for bucket in plan.buckets):
        copy_mapped(plan, [*sources, *built])
    else:
        run_refit(plan, [*sources, *built], verify=data.draw(st.sampled_from(["off", "checksum"])))
    for ours, theirs in zip(built, expected, strict=True):
        assert [name for name in theirs if not torch.equal(as_stored(ours[name]), theirs[name])] == []


def is_cut(whole: Weights, config: Config, held: Slices, tp: int, ep: bool) -> bool:
    """Returns whether a shard of either side splits a block."""
    plain = [vllm_weight_slices(config, VllmRank(tp, rank, expert_parallel=ep)) for rank in range(tp)]
    sides = ((held, False), (plain, True))
    return any(cuts_a_block(whole, mine, local) for ranks, local in sides for mine in ranks)


def expected_on(
    rank: VllmRank, model: tuple[Weights, Weights], config: Config, slices: list[WeightSlice], dtype: torch.dtype
) -> Weights:
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
