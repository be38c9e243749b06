"""Refits on GPUs: copies that the kernel leaves to torch, recorded refits against slicing, moved memory, absent peers."""

from __future__ import annotations

import time

import pytest
import torch

from dagrl.refit import RecordMode, Verify
from dagrl.refit.carry.endpoint import TRIALS
from tests import channel_cases as cases
from tests.channel_cases import Place, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_casts_and_transposed_views_in_a_bucket_are_left_to_torch() -> None:
    from dagrl.refit.kernels.batched import BatchedCopy

    source = torch.randn(64, 64, device="cuda")
    cast, same = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda"), torch.zeros(64, 64, device="cuda")
    turned = torch.zeros(64, 64, device="cuda")
    BatchedCopy([cast, same, turned], [source, source, source.t()]).run()
    assert torch.equal(cast, source.bfloat16()) and torch.equal(same, source) and torch.equal(turned, source.t())


def moved(place: Place) -> object:
    """Six versions over two GPUs: recorded from the second on, recorded again after one side's tensors moved."""
    return _refits(place, 6, record=True, verify="off", moves=(3, 4))


def tried(place: Place) -> object:
    """Two versions more than it takes to find the faster method, with checksums, which both methods must produce."""
    return _refits(place, 3 + 2 * TRIALS, record="auto", verify="checksum")


def emptied(place: Place) -> object:
    """Recorded refits between tensors that lose their memory and get new memory at the same addresses."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # addresses stay valid when their memory is freed
    return _refits(place, 6, record=True, verify="checksum", empties=(3, 4))


def _refits(
    place: Place,
    versions: int,
    record: RecordMode,
    verify: Verify,
    moves: tuple[int, ...] = (),
    empties: tuple[int, ...] = (),
) -> int:
    """Returns how often this rank recorded.

    At the first version of `moves` the sender's tensors move, at the second the other's. At those of `empties` memory is
    given back and taken again, with what was in it.
    """
    from dagrl.refit import RefitReceiver, RefitSender
    from tests.unit.refit.weight_reference import equal, hf_weights, megatron_tensors, vllm_tensors, zeros_like

    plan, layout = cases._refit_plan(place.size)
    channel = place.open()
    recorded = []
    capture = channel.record
    channel.record = lambda work: recorded.append(1) or capture(work)  # type: ignore[method-assign,func-returns-value]
    weights = hf_weights(cases.CONFIG)
    if place.rank == 0:
        held = megatron_tensors(weights, cases.CONFIG, layout, 0)
    else:
        expected = vllm_tensors(weights, cases.CONFIG, 1, 0)
        held = zeros_like(expected)
    if empties:
        live = _in_one_storage(held, place.device)
    else:
        live = {name: torch.nn.Parameter(tensor.to(place.device)) for name, tensor in held.items()}
    end = (RefitSender if place.rank == 0 else RefitReceiver)(plan.for_rank(place.rank, verify, record), live, channel)
    for version in range(versions):
        if version in moves:
            _move(live, place.rank == moves.index(version))
        if version in empties and place.rank == empties.index(version):
            _empty(live)
        if isinstance(end, RefitSender):
            end.send(version)
            for parameter in live.values():
                parameter.data += 1
        else:
            end.receive(version)
            shifted = {name: tensor + version * (tensor != 0) for name, tensor in expected.items()}
            assert equal({name: parameter.data.cpu() for name, parameter in live.items()}, shifted), version
    channel.close()
    return len(recorded)


def _move(live: dict[str, torch.nn.Parameter], mine: bool) -> None:
    if mine:
        for parameter in live.values():
            parameter.data = parameter.data.clone()


def _in_one_storage(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.nn.Parameter]:
    """A view of a large buffer, as in Megatron; large enough for an allocation of its own."""
    storage, used = torch.empty(64 << 20, dtype=torch.uint8, device=device), 0
    live = {}
    for name, tensor in tensors.items():
        part = storage[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        live[name] = torch.nn.Parameter(part.copy_(tensor))
        used += -(-tensor.nbytes // 256) * 256
    return live


def _empty(live: dict[str, torch.nn.Parameter]) -> None:
    storage = next(iter(live.values())).untyped_storage()
    address, size, reserved = storage.data_ptr(), storage.nbytes(), torch.cuda.memory_reserved()
    kept = [parameter.data.cpu() for parameter in live.values()]
    storage.resize_(0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - size
    storage.resize_(size)
    assert storage.data_ptr() == address, "else this is a test of memory that moves"
    for parameter, values in zip(live.values(), kept, strict=True):
        parameter.data.copy_(values)


@two_gpus
def test_a_recorded_refit_writes_to_memory_that_was_freed_and_allocated_again() -> None:
    pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
    assert run_case(emptied, "nccl", 2) == [1, 1]


@two_gpus
def test_a_recorded_refit_follows_moved_memory() -> None:
    pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
    assert run_case(moved, "nccl", 2) == [2, 2]


@two_gpus
def test_refits_that_try_both_methods_are_correct_and_verified_with_each() -> None:
    pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
    assert run_case(tried, "nccl", 2) == [1, 1]


def abandoned(place: Place) -> object:
    """A replay without its peer ends at the deadline, and the channel closes although a graph refers to it."""
    from dagrl.errors import ChannelError

    channel = place.open()
    message = torch.zeros(1 << 20, device=place.device)

    def work() -> None:
        (channel.send(message, 1) if place.rank == 0 else channel.receive(message, 0)).wait()

    work()
    channel.synchronize()
    replay = channel.record(work)
    replay()
    channel.synchronize()
    start, error = time.monotonic(), "no error"
    if place.rank == 1:
        try:
            replay()
            channel.synchronize()
        except ChannelError as caught:
            error = str(caught)
    channel.close()
    return error, time.monotonic() - start


@two_gpus
def test_a_recorded_message_without_a_sender_ends_at_the_deadline() -> None:
    pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
    _, result = run_case(abandoned, "nccl", 2, channel_timeout_s=3)
    assert isinstance(result, tuple), result
    error, seconds = result
    assert "messages did not finish within 3" in error and seconds < 10


def broken_while_recorded(place: Place) -> object:
    """An abort during a recording, after its first message: the graph already refers to the communicator."""
    from dagrl.errors import ChannelError

    channel = place.open()
    message = torch.zeros(1 << 20, device=place.device)

    def work() -> None:
        (channel.send(message, 1) if place.rank == 0 else channel.receive(message, 0)).wait()

    def work_and_break() -> None:
        work()
        _ = channel.send(message, 1) if place.rank == 0 else channel.receive(message, 0)  # nothing waits for it yet
        channel.abort("the test said so")
        work()

    work()
    channel.synchronize()
    replay = channel.record(work)
    start = time.monotonic()
    errors = []
    for act in (lambda: channel.record(work_and_break), replay):
        try:
            act()
        except ChannelError as caught:
            errors.append(str(caught))
    channel.close()
    return errors, time.monotonic() - start


@two_gpus
def test_an_abort_while_messages_are_recorded_returns() -> None:
    pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
    for result in run_case(broken_while_recorded, "nccl", 2, channel_timeout_s=20):
        assert isinstance(result, tuple), result
        errors, seconds = result
        assert len(errors) == 2 and all("the test said so" in error for error in errors) and seconds < 4, result
