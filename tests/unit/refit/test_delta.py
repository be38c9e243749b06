"""Delta refits: the changes are encoded exactly, receivers end with the sender's bytes, and doubts make a refit whole."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dagrl.errors import RefitPlanError, RunError
from dagrl.refit import RefitPlan, RefitReceiver, RefitReport, RefitSender, Verify, WeightSlice, plan_refit
from dagrl.refit.carry import changes
from dagrl.refit.carry.changes import PAGE, apply, encode, pieces
from dagrl.refit.fp8 import quantize_blocks
from dagrl.refit.slices import Box, Scales
from tests.unit.refit.memory_channel import MemoryChannel, Queues

LENGTHS = [1, 7, 8, 9, 254, 255, 256, 300, 2040, 2041, 4099]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PIECE", PAGE * changes.WORD)


@pytest.mark.usefixtures("small_pieces")
@settings(deadline=None, max_examples=150)
@given(st.sampled_from(LENGTHS), st.sampled_from([0.0, 0.001, 0.1, 0.6, 1.0]), st.integers(0, 9), st.integers(0, 2**32))
def test_changes_are_exact(length: int, share: float, skip: int, seed: int) -> None:
    """Any bytes, any share of them changed, and memory that starts anywhere in a word. numpy tells what changed."""
    generator = np.random.default_rng(seed)
    before, other = generator.integers(0, 256, (2, skip + length), dtype=np.uint8)
    after = np.where(generator.random(skip + length) < share, other, before)
    old, new = torch.from_numpy(before.copy())[skip:], torch.from_numpy(after)[skip:]
    receiver = old.clone()
    packets = encode(new, old, 10 * length + 10)
    assert packets is not None and len(packets) == len(pieces(length))
    apply(packets, receiver)
    assert torch.equal(receiver, new) and torch.equal(old, new)
    touched = [(stop - start, int((before != after)[skip:][start:stop].sum())) for start, stop in pieces(length)]
    size = sum(-(-nbytes // PAGE) + 2 * count for nbytes, count in touched if count)
    assert sum(map(len, packets)) == size
    assert encode(new, torch.from_numpy(before.copy())[skip:], size) is not None
    assert size == 0 or encode(new, torch.from_numpy(before)[skip:], size - 1) is None


class Ends:
    """The ends of all ranks of a plan, which stay for several refits. Each rank runs on its own thread."""

    def __init__(self, plan: RefitPlan, tensors: Sequence[dict[str, Tensor]], verify: Verify = "checksum") -> None:
        queues: Queues = {pair: Queue() for pair in product(range(plan.size), repeat=2)}
        self.sources, self.queues = plan.sources, queues
        self.ends: list[Any] = []
        for rank in range(plan.size):
            end = RefitSender if rank < plan.sources else RefitReceiver
            mine = plan.for_rank(rank, verify, delta="lossless")
            self.ends.append(end(mine, tensors[rank], MemoryChannel(rank, plan.size, queues)))

    def run(self, version: int) -> list[RefitReport]:
        calls = [end.send if rank < self.sources else end.receive for rank, end in enumerate(self.ends)]
        with ThreadPoolExecutor(len(calls)) as threads:
            pending = [threads.submit(call, version) for call in calls]
            reports = [one.result() for one in pending]
        assert all(queue.empty() for queue in self.queues.values()), "messages that nobody received"
        return reports


ROWS, COLUMNS = 64, 96


def halves(tensor: str) -> list[list[WeightSlice]]:
    """Two ranks with the left and the right columns of one parameter, and all of another."""
    found = []
    for low in (0, COLUMNS // 2):
        box: Box = ((0, ROWS), (low, low + COLUMNS // 2))
        norm = WeightSlice("norm", ((0, ROWS),), f"{tensor}.norm", ((0, ROWS),))
        found.append([WeightSlice("p", box, tensor, ((0, ROWS), (0, COLUMNS // 2))), norm])
    return found


def whole() -> list[WeightSlice]:
    box: Box = ((0, ROWS), (0, COLUMNS))
    return [WeightSlice("p", box, "s", box), WeightSlice("norm", ((0, ROWS),), "s.norm", ((0, ROWS),))]


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"s": torch.randn(ROWS, COLUMNS).to(dtype), "s.norm": torch.ones(ROWS, dtype=dtype)}


def step(tensors: dict[str, Tensor], share: float) -> None:
    """Changes a share of all elements a little, as an optimizer step does."""
    for tensor in tensors.values():
        tensor.copy_(torch.where(torch.rand(tensor.shape) < share, (tensor.float() * 1.01).to(tensor.dtype), tensor))


def check_halves(sent: dict[str, Tensor], received: Sequence[dict[str, Tensor]]) -> None:
    for number, tensors in enumerate(received):
        held = sent["s"][:, number * COLUMNS // 2 :][:, : COLUMNS // 2].to(tensors["t"].dtype)
        assert torch.equal(tensors["t"], held) and torch.equal(tensors["t.norm"], sent["s.norm"].to(held.dtype))


def received_halves(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [{"t": torch.zeros(ROWS, COLUMNS // 2, dtype=dtype), "t.norm": torch.zeros(ROWS, dtype=dtype)} for _ in range(2)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("verify", ["off", "checksum"])
@pytest.mark.parametrize(("sent", "held"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("hosts", [None, [0, 1, 1]], ids=["one host", "relayed"])
def test_receivers_hold_what_the_sender_holds(verify: Verify, sent: str, held: str, hosts: list[int] | None) -> None:
    """Staged and direct parts, casts and relays, after steps that change little, everything and nothing."""
    plan = plan_refit([whole()], halves("t"), dtype=sent, target_dtype=held, bucket_bytes=5000, direct_bytes=1, hosts=hosts)
    live, received = weights(getattr(torch, sent)), received_halves(getattr(torch, held))
    ends = Ends(plan, [live, *received], verify)
    sizes = []
    for version, share in enumerate((1.0, 0.02, 0.0, 1.0, 0.02)):
        step(live, share)
        reports = ends.run(version)
        check_halves(live, received)
        sizes.append(reports[0].bytes_sent)
        assert sum(one.bytes_sent for one in reports) == sum(one.bytes_received for one in reports)
    assert sizes[0] == plan.summary().sent[0]
    if sent == held:  # otherwise the receivers do not have the bytes that have not changed
        assert sizes[2] == 0 and sizes[1] < 0.3 * sizes[0] and sizes[4] < 0.3 * sizes[0]


def test_an_fp8_engine_gets_changes_of_the_quantized_weights() -> None:
    box: Box = ((0, 256), (0, 256))
    wanted = WeightSlice("p", box, "t", box, "float8_e4m3fn", Scales("t_scale_inv", ((0, 2), (0, 2))))
    plan = plan_refit([[WeightSlice("p", box, "s", box)]], [[wanted]], dtype="bfloat16")
    live = torch.randn(256, 256).bfloat16()
    live[1::200, 1::200] = 50.0  # the peak of each block
    received = {"t": torch.zeros(256, 256, dtype=torch.float8_e4m3fn), "t_scale_inv": torch.zeros(2, 2)}
    ends = Ends(plan, [{"s": live}, received])
    first = ends.run(1)[0].bytes_sent
    live[0, :100] = live[0, :100] * 1.2
    second = ends.run(2)[0].bytes_sent
    quantized, scales = quantize_blocks(live)
    assert torch.equal(received["t"].view(torch.uint8), quantized.view(torch.uint8))
    assert torch.equal(received["t_scale_inv"], scales)
    assert 0 < second < 0.05 * first


def small() -> tuple[Ends, dict[str, Tensor], list[dict[str, Tensor]], int]:
    """Ends after a first refit, with the bytes that it sent."""
    torch.manual_seed(0)
    plan = plan_refit([whole()], halves("t"), dtype="bfloat16")
    live, received = weights(torch.bfloat16), received_halves(torch.bfloat16)
    ends = Ends(plan, [live, *received])
    nbytes = ends.run(0)[0].bytes_sent
    step(live, 0.02)
    return ends, live, received, nbytes


def test_a_rejected_refit_is_followed_by_a_whole_one_for_that_receiver() -> None:
    """Memory is damaged between two refits. Checksums find it, and the next refit repairs it."""
    ends, live, received, nbytes = small()
    received[1]["t"][3, 5] += 1.0
    with pytest.raises(RunError, match=r"'p' .* differs from what rank 0 sent"):
        ends.run(1)
    step(live, 0.02)
    reports = ends.run(2)
    check_halves(live, received)
    assert reports[2].bytes_received == nbytes // 2 and reports[1].bytes_received < 0.3 * nbytes // 2
    step(live, 0.02)
    assert ends.run(3)[0].bytes_sent < 0.3 * nbytes


@pytest.mark.parametrize("lost", ["forgotten", "moved", "new ends"])
def test_receivers_that_lost_their_weights_get_all_of_them(lost: str) -> None:
    """A sender's new memory has the content that it compares. New ends come after a restart or with a replaced worker."""
    ends, live, received, nbytes = small()
    if lost == "new ends":
        ends = Ends(plan_refit([whole()], halves("t"), dtype="bfloat16"), [live, *received])
    elif lost == "moved":
        received[0]["t"].data = torch.zeros_like(received[0]["t"])
        live["s"].data = live["s"].clone()
    else:
        received[0]["t"].zero_()
        ends.ends[1].forget()
    reports = ends.run(1)
    check_halves(live, received)
    if lost == "new ends":
        assert reports[0].bytes_sent == nbytes
    else:
        assert reports[1].bytes_received == nbytes // 2 > 3 * reports[2].bytes_received


def test_a_sender_that_failed_sends_everything_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies may be ahead of the receivers after a failure. Both ranks raise, and the queues are emptied by hand."""
    ends, live, received, nbytes = small()
    calls = []

    def fail(*messages: object) -> list[object]:
        calls.append(messages)
        if len(calls) > 3:
            raise RuntimeError("the link is gone")
        return MemoryChannel.exchange(ends.ends[0]._channel, *messages)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(ends.ends[0]._channel, "exchange", fail)
    monkeypatch.setattr("tests.unit.refit.memory_channel.DEADLINE_S", 0.5)
    with pytest.raises(RuntimeError, match="the link is gone"):
        ends.run(1)
    monkeypatch.undo()
    for queue in ends.queues.values():
        while not queue.empty():
            queue.get()
    assert ends.run(2)[0].bytes_sent == nbytes
    check_halves(live, received)


def test_bad_input() -> None:
    plan = plan_refit([whole()], halves("t"), dtype="bfloat16")
    with pytest.raises(RefitPlanError, match=r"refit.delta is 'lossy'; choose one of off, lossless"):
        plan.for_rank(0, delta="lossy")  # type: ignore[arg-type]
    with pytest.raises(RefitPlanError, match=r"refit\.verify is 'md5'; choose one of off, checksum"):
        plan.for_rank(0, "md5")  # type: ignore[arg-type]
    channel = MemoryChannel(0, 3, {})
    channel.spec = replace(channel.spec, kind="ipc")
    with pytest.raises(RefitPlanError, match=r"share GPUs; .* Set refit.delta to off"):
        RefitSender(plan.for_rank(0, delta="lossless"), weights(torch.bfloat16), channel)
