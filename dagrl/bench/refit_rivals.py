"""Baselines of a refit, measured in the same run: the link itself, and broadcasts of whole parameters.

The rank that holds most of a parameter broadcasts it, so only tensor-parallel shards are gathered first; every receiver gets
the whole model. Then either vLLM's `load_weights` writes it, as in vLLM's examples, or prepared copies of slices do, which
is faster than current practice. Calls from a driver per parameter, also common, are left out. If both sides share a GPU, the
link is the GPU's own memory, and buffers that both map by CUDA IPC replace broadcasts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.refit_control import Control
from dagrl.bench.refit_sides import Side
from dagrl.channels import Channel
from dagrl.refit.carry.pack import view
from dagrl.refit.slices import WeightSlice, expand, volume

RAW_BYTES = (256 << 20, 2 << 30)
_IN_A_ROW = 4 << 30
PACKED_BYTES = 1 << 30  # per bucket, as in vLLM's packed broadcast; two alternate


def raw_bytes_per_second(
    channel: Channel, control: Control, pairs: Mapping[int, int], device: torch.device, sizes: Sequence[int] = RAW_BYTES
) -> dict[int, float]:
    """Returns, per message size, the bytes per second into a receiver while all `pairs` (sender: receiver) send at once."""
    rank = channel.spec.rank
    sources = {receiver: sender for sender, receiver in pairs.items()}
    found: dict[int, float] = {}
    for size in sizes:
        message, count = torch.empty(size, dtype=torch.uint8, device=device), max(1, min(_IN_A_ROW, 16 * size) // size)

        def carry(message: torch.Tensor = message, count: int = count) -> None:
            for _ in range(count):
                if rank in pairs:
                    channel.send(message, pairs[rank]).wait()
                elif rank in sources:
                    channel.receive(message, sources[rank]).wait()
            channel.synchronize()

        found[size] = size * count / _slowest(control, carry)
        del message
    return found


def _slowest(control: Control, carry: Callable[[], object]) -> float:
    """Returns the median of five rounds of the slowest rank."""
    return float(median(max(each) for each in zip(*control.gather(control.seconds(carry, rounds=5, warmup=2)), strict=True)))


def copied_bytes_per_second(control: Control, device: torch.device, sizes: Sequence[int] = RAW_BYTES) -> dict[int, float]:
    """Returns, per size, the bytes per second that rank 0 copies on the device while the others wait."""
    found: dict[int, float] = {}
    for size in sizes:
        there, here = (torch.empty(size if control.rank == 0 else 0, dtype=torch.uint8, device=device) for _ in range(2))
        count = max(1, min(_IN_A_ROW, 16 * size) // size)

        def carry(there: torch.Tensor = there, here: torch.Tensor = here, count: int = count) -> None:
            for _ in range(count):
                there.copy_(here)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        found[size] = size * count / _slowest(control, carry)
        del there, here
    return found


@dataclass
class _Bundle:
    """Whole parameters that one rank sends to all, packed into one buffer of `elements`."""

    root: int
    elements: int = 0
    pieces: list[tuple[int, WeightSlice]] = field(default_factory=list)  # holder, slice
    shapes: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # offset and shape by name


@dataclass
class _Bound:
    """One rank's work for one bundle: copies before and after the broadcast, and messages to or from the root."""

    root: int
    message: torch.Tensor
    packs: tuple[list[torch.Tensor], list[torch.Tensor]]
    gathers: list[tuple[int, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]  # peer, buffer, places, live
    unpacks: tuple[list[torch.Tensor], list[torch.Tensor]]
    loads: list[tuple[str, torch.Tensor]]


class Broadcast:
    """A refit by broadcasts: one parameter at a time (`bundle_bytes` 0), or packed into two alternating buffers.

    With `load`, receivers pass the tensors to their model's `load_weights`.
    """

    _least_slots = 1

    def __init__(
        self, case: RefitCase, side: Side, control: Control, device: torch.device, bundle_bytes: int = 0, load: bool = False
    ) -> None:
        self._rank, self._control, self._senders = control.rank, control, case.train.world_size
        self._load = side.model.load_weights if load and self._is_receiver else None
        bundles = _bundles(case, bundle_bytes)
        slots = 2 if bundle_bytes else self._least_slots
        largest = max(bundle.elements for bundle in bundles)
        self._buffers = [torch.empty(largest, dtype=torch.bfloat16, device=device) for _ in range(slots)]
        gathers = not self._is_receiver and any(holder != one.root for one in bundles for holder, _ in one.pieces)
        self._scratch = [torch.empty(largest if gathers else 0, dtype=torch.bfloat16, device=device) for _ in range(slots)]
        self._connect(device)
        held = {id(one): one for one in expand(side.slices)} if self._is_receiver else {}
        by_name: dict[str, list[WeightSlice]] = defaultdict(list)
        for one in held.values():
            by_name[(case.aliases or {}).get(one.name, one.name)].append(one)
        self._bound = [self._bind(bundle, side, by_name, number % slots) for number, bundle in enumerate(bundles)]

    def _connect(self, device: torch.device) -> None:
        from cupy.cuda import nccl

        self._nccl = nccl
        unique = self._control.gather(nccl.get_unique_id() if self._rank == 0 else None)[0]
        self._communicator = nccl.NcclCommunicator(self._control.size, unique, self._rank)
        self._streams = [torch.cuda.Stream(device) for _ in self._buffers]  # type: ignore[no-untyped-call]

    @property
    def _is_receiver(self) -> bool:
        return self._rank >= self._senders

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers of a rank."""
        return sum(buffer.nbytes for buffer in (*self._buffers, *self._scratch))

    def _bind(self, bundle: _Bundle, side: Side, wanted: Mapping[str, Sequence[WeightSlice]], slot: int) -> _Bound:
        buffer, scratch = self._buffers[slot], self._scratch[slot]
        wholes = {name: _place(buffer, *where) for name, where in bundle.shapes.items()}
        packs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        gathers: dict[int, list[torch.Tensor]] = defaultdict(list)
        for holder, one in bundle.pieces:
            if self._rank not in (holder, bundle.root):
                continue
            place = _box(wholes[one.name], one.box)
            if holder == bundle.root:
                packs[0].append(place)
                packs[1].append(_live(side, one))
            else:
                peer = holder if self._rank == bundle.root else bundle.root
                gathers[peer].append(place if self._rank == bundle.root else _live(side, one))
        unpacks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for name in bundle.shapes if self._is_receiver else ():
            for one in wanted.get(name, ()):
                unpacks[0].append(_live(side, one))
                unpacks[1].append(_box(wholes[name], one.box))
        bound = [(peer, *_staged(scratch, live)) for peer, live in gathers.items()]
        loads = list(wholes.items()) if self._load is not None else []
        return _Bound(bundle.root, buffer[: bundle.elements], packs, bound, ([], []) if loads else unpacks, loads)

    def run(self) -> None:
        """Transfers the whole model; returns when it has arrived on this rank."""
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for number, bound in enumerate(self._bound):
            stream = self._streams[number % len(self._streams)]
            with torch.cuda.stream(stream):
                self._carry(bound, stream.cuda_stream)
        for stream in self._streams:
            current.wait_stream(stream)
        torch.cuda.synchronize()

    def _carry(self, bound: _Bound, stream: int) -> None:
        nccl, communicator = self._nccl, self._communicator
        _copy(*bound.packs)
        for peer, buffer, places, live in bound.gathers:
            if self._rank == bound.root:  # `places` are views of the buffer, `live` of the whole parameters
                communicator.recv(buffer.data_ptr(), buffer.nbytes, nccl.NCCL_UINT8, peer, stream)
                _copy(live, places)
            else:
                _copy(places, live)
                communicator.send(buffer.data_ptr(), buffer.nbytes, nccl.NCCL_UINT8, peer, stream)
        communicator.bcast(bound.message.data_ptr(), bound.message.nbytes, nccl.NCCL_UINT8, bound.root, stream)
        self._put(bound)

    def _put(self, bound: _Bound) -> None:
        """Copies from the buffer to the parameters, on a receiver."""
        _copy(*bound.unpacks)
        if self._load is not None:
            self._load(bound.loads)

    def close(self) -> None:
        """Releases the communicator."""
        torch.cuda.synchronize()
        self._communicator.destroy()


class SharedBuffers(Broadcast):
    """The same between one train and one generation worker on one GPU, over buffers shared by torch's CUDA IPC.

    The sender packs and the receiver maps the buffers. They synchronize once per bundle, so one packs while the other
    unpacks.
    """

    _least_slots = 2

    def _connect(self, device: torch.device) -> None:
        shared = None if self._is_receiver else list(map(reduce_tensor, self._buffers))
        handles = self._control.gather(shared)[0]
        if self._is_receiver:
            assert handles is not None
            self._buffers = [rebuild(*arguments) for rebuild, arguments in handles]

    def run(self) -> None:
        """Transfers the whole model; returns when it has arrived on this rank."""
        for bound in self._bound:
            if not self._is_receiver:
                _copy(*bound.packs)
                torch.cuda.synchronize()
            self._control.barrier()
            if self._is_receiver:
                self._put(bound)
                torch.cuda.synchronize()
        self._control.barrier()

    def close(self) -> None:
        """Releases the buffers, the receiver first."""
        if self._is_receiver:
            self._bound, self._buffers = [], []
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        self._control.barrier()


def _bundles(case: RefitCase, limit: int) -> list[_Bundle]:
    """Returns all parameters of the model, each in a bundle of the rank that holds most of it."""
    holders: dict[str, dict[Any, tuple[int, WeightSlice]]] = defaultdict(dict)
    for rank, slices in enumerate(case.sources()):
        for one in expand(slices):
            holders[one.name].setdefault(one.box, (rank, one))
    open_bundles: dict[int, _Bundle] = {}
    bundles: list[_Bundle] = []
    for name, boxes in holders.items():
        counts: dict[int, int] = defaultdict(int)
        for rank, one in boxes.values():
            counts[rank] += volume(one.box)
        root, size = max(counts, key=lambda rank: (counts[rank], -rank)), sum(counts.values())
        bundle = open_bundles.get(root)
        if bundle is None or 2 * (bundle.elements + size) > limit:
            bundle = open_bundles[root] = _Bundle(root)
            bundles.append(bundle)
        shape = tuple(max(box[dim][1] for box in boxes) for dim in range(len(next(iter(boxes)))))
        bundle.shapes[name] = (bundle.elements, shape)
        bundle.pieces += boxes.values()
        bundle.elements += -(-size // 8) * 8
    return bundles


def _place(buffer: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    return buffer[offset : offset + math.prod(shape)].view(shape)


def _box(whole: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    return whole[tuple(slice(*edges) for edges in box)]


def _live(side: Side, one: WeightSlice) -> torch.Tensor:
    return view(side.tensors, one.tensor, one.local, [stop - start for start, stop in one.box])


def _staged(
    scratch: torch.Tensor, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns a buffer for all of `parts`, a view of it for each, and the parts."""
    places, offset = [], 0
    for part in parts:
        places.append(scratch[offset : offset + part.numel()].view(part.shape))
        offset += part.numel()
    return scratch[:offset], places, list(parts)


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)
