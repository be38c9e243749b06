"""Verified refits find any wrong byte; copies and sums of kernels, on the CPU; histories of refits commit whole versions."""

import ctypes
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.distributed import HashStore

from dagrl.channels.agreement import AGREEMENTS, Agreement
from dagrl.channels.base import as_bytes
from dagrl.channels.spec import ChannelSpec
from dagrl.errors import ChannelError, RunError
from dagrl.refit import RefitPlan, RefitReceiver, RefitSender, Verify, plan_refit
from dagrl.refit.carry.commit import commit_together
from dagrl.refit.carry.pack import BucketMemory
from dagrl.refit.carry.verify import _COLUMNS, _UPPER, _WEIGHT, checksum, compare_checksums, contiguous_bytes
from dagrl.refit.kernels.rows import WORD, ChecksumEntry, SummedView, as_rows, entries, in_rows
from dagrl.refit.slices import Scales, WeightSlice
from dagrl.refit.transfers import DIRECT_BYTES
from tests.unit.refit.memory_channel import Done, MemoryChannel, Pair, run_refit
from tests.unit.refit.test_plan import held


class FlippingChannel(MemoryChannel):
    """Changes one bit of the `at`-th byte of the first `flips` messages of at least 32 bytes that rank `sender` sends."""

    at, flips, sender = 17, 1, 0

    def send(self, tensor: Tensor, peer: int) -> Done:
        if self.spec.rank == self.sender and type(self).flips and tensor.nbytes >= 32 and tensor.dtype == torch.uint8:
            type(self).flips -= 1
            tensor = tensor.clone()
            tensor[self.at] ^= 4
        return super().send(tensor, peer)


@pytest.fixture
def flipping() -> type[FlippingChannel]:
    """A channel of its own, of which no message was changed."""

    class Channel(FlippingChannel):
        pass

    return Channel


def two_parameters(bucket_bytes: int, direct_bytes: int = DIRECT_BYTES) -> tuple[RefitPlan, list[dict[str, Tensor]]]:
    """`p` strided into columns of a stack, `q` contiguous; float32."""
    p, q = held(((0, 6), (0, 10))), WeightSlice("q", ((0, 40),), "u", ((0, 40),))
    halves = [WeightSlice("p", ((0, 6), (5 * i, 5 * i + 5)), "t", ((i, i + 1), (0, 6), (0, 5))) for i in range(2)]
    plan = plan_refit([[p, q]], [[*halves, q]], dtype="float32", bucket_bytes=bucket_bytes, direct_bytes=direct_bytes)
    return plan, [{"t": torch.randn(6, 10), "u": torch.randn(40)}, {"t": torch.zeros(2, 6, 5), "u": torch.zeros(40)}]


@pytest.mark.parametrize("bucket_bytes", [64, 200, 1 << 20])
@pytest.mark.parametrize("direct_bytes", [1, 150, DIRECT_BYTES], ids=["all direct", "q direct", "one message"])
def test_one_flipped_bit_is_found(bucket_bytes: int, direct_bytes: int, flipping: type[FlippingChannel]) -> None:
    plan, tensors = two_parameters(bucket_bytes, direct_bytes)
    with pytest.raises(RunError, match=r"refit to version 7: parameter '[pq]' .* differs from what rank 0 sent"):
        run_refit(plan, tensors, 7, "checksum", flipping)
    assert not flipping.flips
    run_refit(plan, tensors, 8, "checksum", flipping)  # the next complete refit succeeds
    assert torch.equal(tensors[1]["u"], tensors[0]["u"])
    flipping.flips = 1
    run_refit(plan, tensors, 9, "off", flipping)  # without verification it is not found
    assert not (torch.equal(torch.cat(list(tensors[1]["t"]), 1), tensors[0]["t"]) and tensors[1]["u"].equal(tensors[0]["u"]))


def test_the_first_difference_is_named_and_the_others_counted(flipping: type[FlippingChannel]) -> None:
    """Of the first two buckets that rank 1 sends."""
    flipping.flips, flipping.sender = 2, 1
    box = ((0, 6), (0, 10))
    held = [WeightSlice(name, box, name, box) for name in "abcqr"]
    plan = plan_refit([held[:3], held[3:]], [held], dtype="float32", bucket_bytes=240)
    weights = {one.name: torch.randn(6, 10) for one in held}
    tensors = [weights, weights, {name: torch.zeros(6, 10) for name in weights}]
    assert plan.buckets[0].source == 0 and len(plan.buckets) == 5
    with pytest.raises(RunError, match=r"parameter 'q' .* in tensor 'q' differs from what rank 1 sent, and 1 more parts;"):
        run_refit(plan, tensors, 1, "checksum", flipping)


def test_a_single_element_of_a_strided_tensor_has_a_checksum() -> None:
    """Torch calls the view contiguous, although it has the stride of the tensor it is taken from."""
    rows = torch.randn(3, 128)
    one = rows[1:2, 5:6].T
    assert one.is_contiguous() and one.stride() != (1, 1)
    assert torch.equal(checksum(contiguous_bytes([(0, one)])), checksum(as_bytes(one.clone())))
    assert as_bytes(one).data_ptr() == one.data_ptr()


def test_the_channel_stays_usable_after_a_difference(flipping: type[FlippingChannel]) -> None:
    """No message of the failed refit is left in the channel for the next."""
    plan, tensors = two_parameters(64)
    assert len(plan.buckets) > 2
    ends = Pair(plan, *tensors, "checksum", (flipping, MemoryChannel))
    with pytest.raises(RunError, match="differs from what rank 0 sent"):
        ends.refit(1)
    ends.refit(2)
    assert torch.equal(tensors[1]["u"], tensors[0]["u"])


def test_a_byte_that_changes_in_the_live_tensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums cover the live tensors after unpacking, not the received message."""
    plan, tensors = two_parameters(1 << 20)
    copy = BucketMemory.copy

    def spoil(memory: BucketMemory) -> None:
        copy(memory)
        tensors[1]["t"][1, 2, 3] += memory.side == "target"

    monkeypatch.setattr(BucketMemory, "copy", spoil)
    with pytest.raises(RunError, match=r"parameter 'p' .* in tensor 't'"):
        run_refit(plan, tensors, 1, "checksum")


@pytest.mark.parametrize("direct_bytes", [1, DIRECT_BYTES], ids=["all direct", "one message"])
def test_a_byte_that_packing_changes_is_found(direct_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums cover the sent tensors, not the packed message, so they find packing errors that repeat."""
    plan, tensors = two_parameters(1 << 20, direct_bytes)
    copy, spoiled = BucketMemory.copy, []

    def spoil(memory: BucketMemory) -> None:
        copy(memory)
        if memory.side == "source":
            message = memory.messages[0]  # of `p`, which is split into columns
            spoiled.append(message.data_ptr() not in [tensor.data_ptr() for tensor in tensors[0].values()])
            message[21] ^= 1

    monkeypatch.setattr(BucketMemory, "copy", spoil)
    with pytest.raises(RunError, match=r"refit to version 1: parameter 'p' .* differs from what rank 0 sent"):
        run_refit(plan, tensors, 1, "checksum")
    assert spoiled == [True]  # staging, not the weights


def test_packing_that_skips_a_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging still has an earlier version of the weights, equal on both sides."""
    plan, tensors = two_parameters(1 << 20)
    ends = Pair(plan, *tensors, "checksum")
    for version in (1, 2):
        ends.refit(version)
    tensors[0]["t"] += 1
    copy = BucketMemory.copy
    monkeypatch.setattr(BucketMemory, "copy", lambda memory: copy(memory) if memory.side == "target" else None)
    with pytest.raises(RunError, match="parameter 'p'"):
        ends.refit(3)


def test_fp8_and_its_scales_are_verified(flipping: type[FlippingChannel]) -> None:
    box = ((0, 256), (0, 128))
    target = WeightSlice("p", box, "t", box, "float8_e4m3fn", Scales("s", ((0, 2), (0, 1))))
    plan = plan_refit([[held(box)]], [[target]], dtype="bfloat16")
    received = {"t": torch.zeros(256, 128, dtype=torch.float8_e4m3fn), "s": torch.zeros(2, 1)}
    tensors = [{"t": torch.randn(256, 128).bfloat16()}, received]
    run_refit(plan, tensors, 1, "checksum")
    flipping.at = 256 * 128 + 1  # a byte of the first scale
    with pytest.raises(RunError, match="parameter 'p'"):
        run_refit(plan, tensors, 2, "checksum", flipping)


@pytest.mark.parametrize(("sends", "receives"), [("off", "checksum"), ("checksum", "off")])
def test_both_sides_need_the_same_verify_mode(sends: Verify, receives: Verify) -> None:
    plan, tensors = two_parameters(1 << 20)
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    RefitSender(plan.for_rank(0, sends), tensors[0], MemoryChannel(0, 2, queues)).send(1)
    with pytest.raises(ChannelError, match=r"another refit plan or refit\.verify"):
        RefitReceiver(plan.for_rank(1, receives), tensors[1], MemoryChannel(1, 2, queues)).receive(1)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 1024), (0, 1024), (0, 512 << 10), (1024, 513 << 10)])
def test_checksums_detect_two_swapped_words(first: int, second: int) -> None:
    """Includes words at equal distance from the first column and row, and rows that are summed separately."""
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (600 << 10,))
    exchanged = words.clone()
    exchanged[[first, second]] = words[[second, first]]
    assert not torch.equal(checksum(as_bytes(exchanged)), checksum(as_bytes(words)))


@pytest.mark.parametrize("place", [0, 1], ids=["plain", "weighted"])
def test_one_different_sum_is_enough(place: int) -> None:
    plan, _ = two_parameters(64)
    moves = [move for bucket in plan.for_rank(1).receives for move in bucket.moves]
    sent = torch.arange(2 * len(moves)).view(-1, 2)
    held = sent.clone()
    compare_checksums(moves, sent, held, 0, 1)
    held[2, place] += 1
    with pytest.raises(RunError, match=re.escape(f"parameter {moves[2].name!r} {moves[2].box} in") + ".* sent; replay"):
        compare_checksums(moves, sent, held, 0, 1)


@pytest.mark.parametrize("bit", [63, 62, 61, 31])
def test_checksums_detect_a_bit_flipped_in_two_words(bit: int) -> None:
    """Flipping an even number of the highest bits, the signs, does not change a plain sum."""
    generator = torch.Generator().manual_seed(bit)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (4096,), generator=generator)
    first = checksum(as_bytes(words))
    for _ in range(200):
        changed = words.clone()
        changed[torch.randperm(len(words), generator=generator)[:2]] ^= -(1 << 63) if bit == 63 else 1 << bit
        assert not torch.equal(checksum(as_bytes(changed)), first)


@pytest.mark.parametrize(("dtype", "period"), [(torch.bfloat16, 4), (torch.float32, 2), (torch.float32, 1)])
def test_checksums_detect_a_lane_of_lost_or_flipped_signs(dtype: torch.dtype, period: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        values = torch.randn(64, 256, generator=generator).to(dtype)
        lost, turned = values.clone(), values.clone()
        lost.view(-1)[period - 1 :: period].abs_()
        turned.view(-1)[period - 1 :: period].neg_()
        for changed in (lost, turned):
            assert not torch.equal(checksum(as_bytes(changed)), checksum(as_bytes(values)))


@pytest.mark.parametrize("size", [1, 3, 4, 64, 16 * 1024, 16 * 1024 * 3 + 7, 70_000])
def test_checksums_detect_single_bytes(size: int) -> None:
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
    first = checksum(raw)
    for at in {0, size // 2, size - 1}:
        changed = raw.clone()
        changed[at] ^= 1
        assert not torch.equal(checksum(changed), first)


Shape = tuple[int, ...]


def run(target: Tensor, source: Tensor) -> bool:
    """Copies like the kernel. Returns False if the copy is left to torch."""
    rows = as_rows(target, source)
    for one in rows or ():
        for row in range(one.count):
            ctypes.memmove(one.target + row * one.target_stride, one.source + row * one.source_stride, one.nbytes)
    return rows is not None


@st.composite
def views(draw: st.DrawFn, shape: Shape) -> tuple[Tensor, Tensor]:
    """A tensor and a view of `shape` in it, sometimes with two dimensions swapped."""
    outer = [draw(st.integers(size, size + 2)) for size in shape]
    starts = [draw(st.integers(0, around - size)) for around, size in zip(outer, shape, strict=True)]
    dims = draw(st.permutations(range(len(shape)))) if draw(st.integers(0, 4)) == 0 else list(range(len(shape)))
    held = torch.zeros([outer[dim] for dim in dims], dtype=torch.bfloat16)
    whole = held.permute([dims.index(dim) for dim in range(len(shape))])
    return held, whole[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_copy_what_torch_copies(data: st.DataObject) -> None:
    """For any two views of one shape; nothing else is written."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    (held, target), (values, source) = (data.draw(views(shape)) for _ in range(2))
    values.copy_(torch.arange(1, values.numel() + 1).view(values.shape))
    expected = source.clone()
    if run(target, source):
        assert torch.equal(target, expected)
        assert held.count_nonzero() == expected.numel()
    else:
        assert shape and max(shape) > 1, "a single element is a row"


def test_whole_rows_merge_and_columns_do_not() -> None:
    target, source = torch.zeros(6, 10), torch.ones(8, 10)
    (one,) = as_rows(target[1:5], source[2:6]) or ()
    assert (one.count, one.nbytes) == (1, 4 * 40)
    (padded,) = as_rows(torch.zeros(2, 3, 6)[..., :5], torch.ones(2, 3, 7)[..., :5]) or ()
    assert (padded.count, padded.nbytes, padded.target_stride, padded.source_stride) == (6, 20, 24, 28)
    (cut,) = as_rows(target[:, 2:5], source[2:, :3]) or ()
    assert (cut.count, cut.nbytes, cut.target_stride, cut.source_stride) == (6, 12, 40, 40)


@pytest.mark.parametrize("other", [torch.ones(6, 4).t(), torch.ones(4, 6, dtype=torch.float16)], ids=["transposed", "cast"])
def test_other_copies_are_left_to_torch(other: Tensor) -> None:
    assert not run(torch.zeros(4, 6), other) and not run(other, torch.zeros(4, 6))


MASK = (1 << 64) - 1


def sums_of(table: Sequence[ChecksumEntry], moves: int) -> Tensor:
    """Returns `[moves, 2]`, computed like `_add_sums`, unit by unit."""
    found = [[0, 0] for _ in range(moves)]
    for address, units, total, stride, width, offset, owner in table:
        assert not address % width and not stride % width, "a GPU reads words at multiples of their size alone"
        for unit in range(total):
            row, column = divmod(unit, units)
            raw = ctypes.string_at(address + row * stride + column * width, width)
            place = offset + unit * width
            word, value = place // WORD, int.from_bytes(raw, "little") << (8 * (place % WORD))
            value -= (value >> 63) << 64  # as an int64
            weight = 2 * (word // _COLUMNS) + 1 + (2 * (word % _COLUMNS) + 1) * _WEIGHT
            found[owner][0] += value
            found[owner][1] += (value + _UPPER * (value >> 32)) * weight
    return torch.from_numpy(np.array([[one & MASK for one in pair] for pair in found], np.uint64).view(np.int64))


def assert_same_sums(moves: Sequence[Sequence[SummedView]]) -> None:
    expected = torch.stack([checksum(contiguous_bytes(pieces)) for pieces in moves])
    placed = [[(at, view if in_rows(view) else view.contiguous()) for at, view in pieces] for pieces in moves]
    assert torch.equal(sums_of(entries(placed), len(moves)), expected)


def random(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_parts_of_tensors_have_the_sums_of_their_bytes(data: st.DataObject) -> None:
    """Any box of a tensor of up to three dimensions, at any address; several moves, with gaps between their views."""
    moves: list[list[SummedView]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        pieces: list[SummedView] = []
        offset = 0
        for _ in range(data.draw(st.integers(1, 3))):
            dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
            shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
            starts = [data.draw(st.integers(0, size - 1)) for size in shape]
            stops = [data.draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
            view = random(*shape, dtype=dtype)[tuple(map(slice, starts, stops))]
            pieces.append((offset, view))
            offset += view.nbytes + data.draw(st.sampled_from([0, 0, 3, 16]))
        moves.append(pieces)
    assert_same_sums(moves)


@pytest.mark.parametrize("size", [1, 7, 8, 8 * _COLUMNS, 8 * _COLUMNS + 3, 24 * _COLUMNS + 8 * 5])
def test_rows_of_columns_and_their_remainder(size: int) -> None:
    assert_same_sums([[(0, random(size))]])


def test_rows_are_read_in_words_and_only_the_end_in_bytes() -> None:
    weight = random(64, 96, dtype=torch.bfloat16)
    assert [entry[1:6] for entry in entries([[(0, weight[:, 32:64])]])] == [(8, 8 * 64, 192, WORD, 0)]
    assert [entry[4:] for entry in entries([[(0, weight.flatten()[:35])]])] == [(WORD, 0, 0), (1, 64, 0)]
    assert_same_sums([[(0, weight[:, 32:64])], [(0, weight[3:5, 1:36])]])


def test_a_transposed_view_has_no_rows() -> None:
    assert not in_rows(random(8, 8).t())


SENDERS = 1
Fate = Literal["completes", "refuses", "raises", "dies before its vote", "dies after its vote"]
FATES = st.just("completes") | st.sampled_from(get_args(Fate))
NOT_VOTING = {"refuses", "raises", "dies before its vote"}


class Died(BaseException):
    """The end of a simulated process, which runs nothing more."""


class End:
    """A rank's end of a channel that carries votes alone; a peer's death shows as a broken connection."""

    def __init__(self, store: HashStore, words: Any, rank: int, size: int, peer_died: threading.Event) -> None:
        self._agreement = Agreement(store, ChannelSpec("gloo", "memory:0", rank, size, timeout_s=20.0))
        if words is not None:
            self._agreement.use_memory(words)
        self._peer_died = peer_died
        self.fate: Fate = "completes"

    def release(self) -> None:
        if self.fate == "dies before its vote":
            self._die()

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        dies = self.fate == "dies after its vote"
        self._agreement.reach(self._check, refusal, wait=wait and not dies)
        if dies:
            self._die()

    def abort(self, reason: str) -> None:
        if self.fate != "dies before its vote":
            self._agreement.abort(reason)

    def _die(self) -> None:
        self._peer_died.set()
        raise Died

    def _check(self) -> None:
        if self._peer_died.is_set():
            raise ChannelError("a peer is gone")


class Commits(RuleBasedStateMachine):
    """One rank sends, the others are engines. An engine is open at the version that it may generate from, else None."""

    @initialize(engines=st.integers(1, 3), one_host=st.booleans())
    def begin(self, engines: int, one_host: bool) -> None:
        self.size, self.one_host = SENDERS + engines, one_host
        self.version = 0
        self.open: list[int | None] = [None] * engines
        self.whole = {0}  # versions that every rank has sent or holds
        self.connect()

    def connect(self) -> None:
        store, died = HashStore(), threading.Event()
        words = np.zeros(AGREEMENTS * self.size, np.int64) if self.one_host else None
        self.ends = [End(store, words, rank, self.size, died) for rank in range(self.size)]
        self.usable = True

    @precondition(lambda self: self.usable)
    @rule(data=st.data())
    def refit(self, data: st.DataObject) -> None:
        fates = data.draw(st.lists(FATES, min_size=self.size, max_size=self.size))
        self.version += 1
        if not NOT_VOTING & set(fates):
            self.whole.add(self.version)
        with ThreadPoolExecutor(self.size) as pool:
            outcomes = list(pool.map(self.take_part, range(self.size), fates))
        self.usable = set(fates) <= {"completes", "refuses"}
        if set(fates) == {"completes"}:
            assert outcomes == [None] * self.size and set(self.open) == {self.version}
        for fate, outcome in zip(fates[SENDERS:], outcomes[SENDERS:], strict=True):
            assert fate != "completes" or NOT_VOTING.isdisjoint(fates) or isinstance(outcome, ChannelError)

    def take_part(self, rank: int, fate: Fate) -> BaseException | None:
        """Runs a rank's part as a worker does: an engine closes, receives, commits, and opens."""
        engine, end = rank - SENDERS, self.ends[rank]
        end.fate = fate
        if engine >= 0:
            self.open[engine] = None
        channel: Any = end
        try:
            with commit_together(channel, wait=engine >= 0):
                if fate == "refuses":
                    raise RunError("verification failed")
                if fate == "raises":
                    raise ValueError("a bug")
        except BaseException as error:
            return error
        if engine >= 0:
            self.open[engine] = self.version
        return None

    @precondition(lambda self: not self.usable)
    @rule()
    def reconnect(self) -> None:
        """As after a failure: new processes in place of the dead, and a new channel."""
        self.connect()

    @invariant()
    def no_engine_uses_a_part_of_a_version(self) -> None:
        used = [version for version in getattr(self, "open", []) if version is not None]
        assert len(set(used)) <= 1 and set(used) <= getattr(self, "whole", set())


Commits.TestCase.settings = settings(deadline=None, max_examples=10, stateful_step_count=10)
TestCommits = Commits.TestCase
