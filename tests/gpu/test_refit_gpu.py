"""Refits on GPUs: copies that the kernel leaves to torch, and refits against slicing while memory moves."""

from collections.abc import Callable

import pytest
import torch

from dagrl.refit import Verify
from tests import channel_cases as cases
from tests.channel_cases import Place, run_case
from tests.gpu import needs_gpus


def test_casts_and_transposed_views_in_a_bucket_are_left_to_torch() -> None:
    from dagrl.refit.kernels.batched import BatchedCopy

    source = torch.randn(64, 64, device="cuda")
    cast, same = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda"), torch.zeros(64, 64, device="cuda")
    turned = torch.zeros(64, 64, device="cuda")
    BatchedCopy([cast, same, turned], [source, source, source.t()]).run()
    assert torch.equal(cast, source.bfloat16()) and torch.equal(same, source) and torch.equal(turned, source.t())


def moved(place: Place) -> object:
    """Six versions over two GPUs; the tensors of one side move before the fourth, those of the other before the fifth."""
    return _refits(place, 6, verify="off", moves=(3, 4))


def emptied(place: Place) -> object:
    """Refits between tensors that lose their memory and get new memory at the same addresses."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # addresses stay valid when their memory is freed
    return _refits(place, 6, verify="checksum", empties=(3, 4))


def _refits(place: Place, versions: int, verify: Verify, moves: tuple[int, ...] = (), empties: tuple[int, ...] = ()) -> int:
    """Returns the number of versions that arrived.

    At the first version of `moves` the sender's tensors move, at the second the other's. At those of `empties` memory is
    given back and taken again, with what was in it.
    """
    from dagrl.refit import RefitReceiver, RefitSender
    from tests.unit.refit.weight_reference import equal, zeros_like

    plan, channel = cases.refit_plan(place.size), place.open()
    is_source, expected = cases.sent_and_expected(place.size, place.rank)
    held = expected if is_source else zeros_like(expected)
    if empties:
        live = _in_one_storage(held, place.device)
    else:
        live = {name: torch.nn.Parameter(tensor.to(place.device)) for name, tensor in held.items()}
    end = (RefitSender if place.rank == 0 else RefitReceiver)(plan.for_rank(place.rank, verify), live, channel)
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
    return versions


def _move(live: dict[str, torch.nn.Parameter], mine: bool) -> None:
    if mine:
        for parameter in live.values():
            parameter.data = parameter.data.clone()


def _in_one_storage(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.nn.Parameter]:
    """Returns views of one buffer, as in Megatron, large enough for an allocation of its own."""
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


@needs_gpus(2)
@pytest.mark.parametrize("case", [moved, emptied])
def test_a_refit_follows_memory_that_moved_or_was_allocated_again(case: Callable[[Place], object]) -> None:
    pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
    assert run_case(case, "nccl", 2) == [6, 6]
