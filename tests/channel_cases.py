"""Cases that every channel must pass, with one process per rank.

`run_case` starts the processes and gives back what each rank returned. A case gets the rank's `Place` and returns
something picklable. Used by tests/integration/test_channel_{gloo,ipc}.py and tests/gpu/test_channel_nccl.py.
"""

import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dagrl.channels import Channel, ChannelSpec, ipc_memory, open_channel
from dagrl.channels.base import wait_all
from dagrl.channels.ipc import IpcChannel
from dagrl.channels.ipc_memory import BORROWED, HostSegment
from dagrl.errors import ChannelError, DagrlError
from dagrl.refit import RefitPlan, RefitReceiver, RefitSender, commit_together, plan_refit
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.store import reserve_port
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.unit.refit import weight_reference as reference

Kind = Literal["gloo", "nccl", "ipc", "ipc on a GPU", "ipc between GPUs"]


@dataclass(frozen=True)
class Place:
    """One rank: its channel spec, and a port for each side's default process group."""

    spec: ChannelSpec
    side_ports: tuple[int, int]
    device: str = "cpu"

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def size(self) -> int:
        return self.spec.size

    def open(self) -> Channel:
        return open_channel(self.spec)


Case = Callable[[Place], object]
Messages = Sequence[tuple[torch.Tensor, int]]


def run_case(case: Case, kind: Kind, size: int, channel_timeout_s: float = 20.0, limit_s: float = 60.0) -> list[Any]:
    """Runs `case` on `size` ranks. Returns None for a rank that died; one that raised fails the test with its traceback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.channel_cases"])
    ports, address = (reserve_port(), reserve_port()), f"127.0.0.1:{reserve_port()}"
    running = []
    for rank in range(size):
        backend: Literal["gloo", "nccl", "ipc"] = kind if kind == "gloo" or kind == "nccl" else "ipc"
        device = {"nccl": f"cuda:{rank}", "ipc on a GPU": "cuda:0", "ipc between GPUs": f"cuda:{rank}"}.get(kind, "cpu")
        place = Place(ChannelSpec(backend, address, rank, size, channel_timeout_s), ports, device)
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(case, place, limit_s, theirs))
        process.start()
        theirs.close()
        running.append((process, ours))
    try:
        return [_result(connection, time.monotonic() + limit_s) for _, connection in running]
    finally:
        for process, _ in running:
            process.kill()
            process.join()


def _result(connection: Connection, deadline: float) -> object:
    if not wait([connection], max(0.0, deadline - time.monotonic())):
        raise TimeoutError("a rank hangs")
    try:
        result, error = connection.recv()
    except EOFError:
        return None  # killed
    assert not error, error
    return result


def _run(case: Case, place: Place, limit_s: float, connection: Connection) -> None:
    faulthandler.dump_traceback_later(0.9 * limit_s)  # shows where it hangs
    torch.set_num_threads(1)
    if place.device != "cpu":
        torch.cuda.set_device(place.device)
    try:
        connection.send((case(place), ""))
    except Exception:
        connection.send((None, traceback.format_exc()))


def join_own_world(place: Place) -> None:
    """Opens a default process group of the rank's side, as train and generation workers have."""
    half = place.size // 2
    side, rank = divmod(place.rank, half)
    address = f"tcp://127.0.0.1:{place.side_ports[side]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=half)


def own_world_works(place: Place) -> bool:
    half = place.size // 2
    total = torch.tensor([float(place.rank)])
    dist.all_reduce(total)
    return total.item() == sum(rank for rank in range(place.size) if rank // half == place.rank // half)


def messages(place: Place) -> object:
    """All pairs, several dtypes and sizes, in order, while each side has a default process group."""
    join_own_world(place)
    channel = place.open()
    assert own_world_works(place)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    for number, dtype in enumerate(dtypes):
        for count in (1, 1000, 300_000):
            peers = [rank for rank in range(place.size) if rank != place.rank]
            mine = torch.full((count,), 10 * place.rank + number, dtype=dtype, device=place.device)
            got = {peer: torch.zeros(count, dtype=dtype, device=place.device) for peer in peers}
            pending = channel.exchange([(mine, peer) for peer in peers], [(got[peer], peer) for peer in peers])
            for message in pending:
                message.wait()
            channel.synchronize()
            assert all(bool((got[peer] == 10 * peer + number).all()) for peer in peers), (dtype, count)
    assert own_world_works(place)
    channel.close()
    channel.close()
    dist.destroy_process_group()
    return "done"


def order(place: Place) -> object:
    """Messages of one pair arrive in the order sent, although the receives are posted first."""
    channel = place.open()
    values = [torch.full((4096,), float(index), device=place.device) for index in range(20)]
    if place.rank == 0:
        time.sleep(0.1)
        pending = [channel.send(value, 1) for value in values]
    else:
        values = [torch.zeros_like(value) for value in values]
        pending = [channel.receive(value, 0) for value in values]
    for message in pending:
        message.wait()
    channel.synchronize()
    channel.close()
    return [int(value[0]) for value in values]


CONFIG = reference.model_config("qwen3_moe", hidden_size=32, vocab_size=1000)


def mailboxes(place: Place) -> object:
    """Growing messages over IPC, a release, and more messages. Returns what rank 0 freed while rank 1 mapped it.

    Gives that list, and the memory files that rank 0 had open before the first message and after the release.
    """
    channel = place.open()
    before = _memory_files()
    torn: list[int] = []
    close = HostSegment.close

    def watched(segment: HostSegment) -> None:
        inode = f" {os.fstat(segment._descriptor).st_ino} " if segment._descriptor is not None else ""
        if inode:  # only the owner keeps one
            maps = open(f"/proc/{peer}/maps").read()
            torn.extend(len(segment.bytes) for line in maps.splitlines() if "memfd:dagrl" in line and inode in line)
        close(segment)

    mine, theirs = torch.full((1000,), os.getpid()), torch.zeros(1000, dtype=torch.int64)
    for message in channel.exchange([(mine, 1 - place.rank)], [(theirs, 1 - place.rank)]):
        message.wait()
    peer, received = int(theirs[0]), weakref.ref(theirs)
    del theirs, message
    assert received() is None, "a message that has arrived holds its tensor until garbage is collected"
    HostSegment.close = watched  # type: ignore[method-assign]
    for round_ in range(2):
        for count in (10, 1000, 100_000, 1_000_000):
            tensor = torch.full((count,), round_ + 1.0)
            message = channel.send(tensor, 1) if place.rank == 0 else channel.receive(tensor.zero_(), 0)
            message.wait()
            assert bool((tensor == round_ + 1).all())
        channel.release()
        channel.agree()
        channel.release()
    after = _memory_files()
    HostSegment.close = close  # type: ignore[method-assign]
    channel.agree()
    channel.close()
    return torn, before, after


def _memory_files() -> int:
    """Shared memory that this process has open."""
    held = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            held += "memfd:dagrl" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # of the directory itself
            continue
    return held


def refit_plan(size: int, devices: Sequence[str] = ()) -> RefitPlan:
    half = size // 2
    layout = ParallelLayout(dp=half, ep=half)
    sources = [megatron_weight_slices(CONFIG, layout, rank) for rank in range(half)]
    targets = [reference.vllm_weight_slices(CONFIG, reference.VllmRank(half, rank)) for rank in range(half)]
    # Some messages of each bucket are direct, at one end or both.
    return plan_refit(sources, targets, dtype="float32", bucket_bytes=20_000, direct_bytes=2_000, devices=devices)


def sent_and_expected(size: int, rank: int) -> tuple[bool, reference.Weights]:
    """Returns whether a rank of `refit_plan` is a source, and the tensors that it sends, or should receive."""
    half, weights = size // 2, reference.hf_weights(CONFIG)
    if rank < half:
        return True, reference.megatron_tensors(weights, CONFIG, ParallelLayout(dp=half, ep=half), rank)
    return False, reference.vllm_tensors(weights, CONFIG, half, rank - half)


def refit(place: Place) -> object:
    """Three versions with different weights arrive where an independent slicing puts them."""
    join_own_world(place)
    plan, channel = refit_plan(place.size), place.open()
    is_source, expected = sent_and_expected(place.size, place.rank)
    held = expected if is_source else reference.zeros_like(expected)
    tensors = {name: tensor.clone().to(place.device) for name, tensor in held.items()}
    end = (RefitSender if is_source else RefitReceiver)(plan.for_rank(place.rank), tensors, channel)
    bytes_ = []
    for version in (1, 2, 3):
        if isinstance(end, RefitSender):
            report = end.send(version)
            for tensor in tensors.values():
                tensor += 1
        else:
            report = end.receive(version)
            shift = version - 1
            scaled = {name: tensor + shift * (tensor != 0) for name, tensor in expected.items()}
            assert reference.equal({name: tensor.cpu() for name, tensor in tensors.items()}, scaled), version
        bytes_.append((report.version, report.bytes_sent, report.bytes_received))
    assert own_world_works(place)
    channel.close()
    return bytes_


def relayed(place: Place) -> object:
    """One source, three replicas on another host: each byte is sent there once and relayed."""
    layout, wanted = ParallelLayout(), reference.vllm_weight_slices(CONFIG, reference.VllmRank())
    sources, hosts = [megatron_weight_slices(CONFIG, layout, 0)], [0, 1, 1, 1]
    plan = plan_refit(sources, [wanted] * 3, dtype="float32", bucket_bytes=20_000, hosts=hosts)
    channel = place.open()
    weights = reference.hf_weights(CONFIG)
    sent = received = 0
    if place.rank == 0:
        tensors = reference.megatron_tensors(weights, CONFIG, layout, 0)
        sender = RefitSender(plan.for_rank(0), tensors, channel)
        for _ in range(2):
            sent += sender.send(1).bytes_sent
            for tensor in tensors.values():
                tensor *= 2
    else:
        expected = reference.vllm_tensors(weights, CONFIG, 1, 0)
        tensors = reference.zeros_like(expected)
        receiver = RefitReceiver(plan.for_rank(place.rank), tensors, channel)
        for factor in (1, 2):
            report = receiver.receive(1)
            sent, received = sent + report.bytes_sent, received + report.bytes_received
            assert reference.equal(tensors, {name: tensor * factor for name, tensor in expected.items()}), factor
    channel.agree()
    channel.close()
    return sent, received, 2 * sum(tensor.nbytes for tensor in weights.values())


def failing_rank(place: Place, failing: int) -> object:
    """In the second of three refits its tensors no longer fit the plan. Returns each refit's outcome and seconds."""
    plan, channel = refit_plan(2), place.open()
    _, tensors = sent_and_expected(2, place.rank)
    tensors = {name: torch.nn.Parameter(tensor.clone().to(place.device)) for name, tensor in tensors.items()}
    end = (RefitReceiver if place.rank else RefitSender)(plan.for_rank(place.rank), tensors, channel)
    moved = next(tensor for tensor in tensors.values() if tensor.dim() == 2)
    found = []
    for version in (1, 2, 3):
        whole = moved.data
        if (place.rank, version) == (failing, 2):
            moved.data = torch.zeros(3, 3, device=place.device)
        start = time.monotonic()
        try:
            with commit_together(channel, wait=True):
                _ = end.send(version) if isinstance(end, RefitSender) else end.receive(version)
            error = ""
        except DagrlError as caught:
            error = f"{type(caught).__name__}: {caught}"
        found.append((error, time.monotonic() - start))
        moved.data = whole
    channel.close()
    return found


def _error_of(act: Callable[[], object]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        act()
    except ChannelError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def _receive(channel: Channel, peer: int, place: Place) -> None:
    channel.receive(torch.zeros(1 << 16, device=place.device), peer).wait()
    channel.synchronize()


def killed_peer(place: Place) -> object:
    """The last rank is killed while rank 0 waits for it and the others wait for rank 0."""
    channel = place.open()
    if place.rank == place.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    awaited = place.size - 1 if place.rank == 0 else 0
    first = _error_of(lambda: _receive(channel, awaited, place))
    again = _error_of(lambda: _receive(channel, awaited, place))
    channel.close()
    return first, again


def killed_in_a_refit(place: Place) -> object:
    """A source is killed during a refit. Its receivers, and sources that send to them, raise errors."""
    plan, channel = refit_plan(place.size), place.open()
    is_source, held = sent_and_expected(place.size, place.rank)
    tensors = {name: tensor.clone().to(place.device) for name, tensor in held.items()}
    if is_source:
        sender = RefitSender(plan.for_rank(place.rank), tensors, channel)
        if place.rank == 0:
            sender.send(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return _error_of(lambda: [sender.send(version) for version in range(1, 200)])
    receiver = RefitReceiver(plan.for_rank(place.rank), tensors, channel)
    return _error_of(lambda: [receiver.receive(version) for version in range(1, 200)])


def silent_peer(place: Place) -> object:
    """No rank sends: the deadline ends the wait."""
    channel = place.open()
    if place.rank == 0:
        found = _error_of(lambda: _receive(channel, 1, place))
        channel.close()
        return found
    for _ in range(3):  # until rank 0 has aborted, which ends an agreement
        if "rank 0 failed" in _error_of(channel.agree)[0]:
            break
    return "silent"


def aborted(place: Place) -> object:
    """`abort` from another thread frees rank 0 and every peer that waits for it, long before the deadline."""
    channel = place.open()
    if place.rank == 0:
        threading.Timer(0.3, channel.abort, args=("the scheduler said so",)).start()
    found = _error_of(lambda: _receive(channel, (place.rank + 1) % place.size if place.rank == 0 else 0, place))
    channel.close()
    return found


class _Interrupted(list[tuple[torch.Tensor, int]]):
    """Messages of a group. Another thread aborts the channel after the first one has been read from the list."""

    channel: Channel

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for number, message in enumerate(super().__iter__()):
            if number == 1:
                thread = threading.Thread(target=self.channel.abort, args=("the scheduler said so",))
                thread.start()
                thread.join()
            yield message


def aborted_while_posting(place: Place) -> object:
    """A channel is aborted while a group is posted: the posting thread raises, at the latest in its wait, and so do peers.

    The error of each rank, that of the rank that tries again, and descriptors and threads after each round.
    """
    counts = []
    for address in (place.spec.address, *(f"127.0.0.1:{port}" for port in place.side_ports)):
        channel = open_channel(replace(place.spec, address=address))
        posted = _Interrupted((torch.zeros(1000, device=place.device), 1 - place.rank) for _ in range(3))
        posted.channel = channel
        plain = list.copy(posted)
        found = _error_of(functools.partial(_exchange, channel, *((posted, []) if place.rank == 0 else ([], plain))))
        again = _error_of(functools.partial(_exchange, channel, [], plain))
        channel.close()
        del channel, posted
        gc.collect()
        counts.append(_settled(counts[1] if len(counts) > 1 else (0, 0)))
    return found, again, counts


def _exchange(channel: Channel, sends: Messages, receives: Messages) -> None:
    wait_all(channel.exchange(sends, receives))
    channel.synchronize()
    if receives:  # all of them may have arrived
        channel.agree()


def agreement(place: Place) -> object:
    """No rank returns before the last vote; a refusal reaches all; all agree again; then one rank dies."""
    channel = place.open()
    is_last = place.rank == place.size - 1
    if is_last:
        time.sleep(0.3)
    voted = torch.tensor([time.monotonic()], dtype=torch.float64, device=place.device)  # one clock for all processes
    channel.agree(wait=place.rank != 1)  # rank 1 votes and returns
    after = time.monotonic()
    refused = _error_of(lambda: channel.agree("it holds other weights" if is_last else ""))[0]
    last, others = place.size - 1, range(place.size - 1)
    wait_all(channel.exchange([(voted, rank) for rank in others] if is_last else [], [] if is_last else [(voted, last)]))
    channel.synchronize()
    channel.agree()
    if is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    died = _error_of(channel.agree)
    channel.close()
    return float(voted), after, refused, died


def absent_rank(place: Place) -> object:
    """The last rank never opens its end."""
    if place.rank == place.size - 1:
        return "absent"
    return _error_of(place.open)


def reopened(place: Place) -> object:
    """Opening and closing at one address repeatedly leaves no thread and no descriptor."""
    counts = []
    for _ in range(6):
        channel = place.open()
        tensor = torch.zeros(1000, device=place.device)
        (channel.send if place.rank == 0 else channel.receive)(tensor, 1 - place.rank).wait()
        channel.synchronize()
        if place.device == "cpu":
            _meet(channel, place)
        channel.close()
        del channel
        gc.collect()
        counts.append(_settled(counts[1] if len(counts) > 1 else (0, 0)))
    return counts


def _settled(expected: tuple[int, int]) -> tuple[int, int]:
    """Returns descriptors and threads of this process, after waiting a moment for those that are ending."""
    until = time.monotonic() + (10.0 if any(expected) else 0.3)
    while True:
        count = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if all(now <= then for now, then in zip(count, expected, strict=True)) or time.monotonic() > until:
            return count
        time.sleep(0.05)


def _meet(channel: Channel, place: Place) -> None:
    """Waits for all ranks, so that no rank closes while another still works."""
    token = torch.zeros(1)
    for sender in (0, 1):
        (channel.send if place.rank == sender else channel.receive)(token, 1 - place.rank).wait()


def refused(place: Place) -> object:
    """Messages that a channel rejects."""
    channel = place.open()
    square = torch.zeros(4, 4, device=place.device)
    elsewhere = torch.zeros(4, device="meta")
    tries = [(square, place.rank), (square, 7), (square.t()[:, 1:], 1 - place.rank), (elsewhere, 1 - place.rank)]
    found = [_error_of(lambda message=message: channel.send(*message))[0] for message in tries]  # type: ignore[misc]
    channel.close()
    closed = [_error_of(act)[0] for act in (lambda: channel.send(square, 1 - place.rank), channel.agree)]
    return [*found, *closed]


class SharedAllocation(NamedTuple):
    start: int
    name: str

    def handle(self) -> str:
        return self.name


class SharedMemory:
    """Allocates tensors on the host, and tells the allocation of a tensor as `allocation_of` does on a GPU."""

    def __init__(self) -> None:
        self.segments: list[HostSegment] = []

    def copies(self, tensors: reference.Weights) -> reference.Weights:
        """Copies of `tensors` in one new allocation, each at a multiple of 64 bytes."""
        steps = [-(-tensor.nbytes // 64) * 64 for tensor in tensors.values()]
        segment = HostSegment(64 + sum(steps))
        self.segments.append(segment)
        found, end = {}, 64
        for (name, tensor), step in zip(tensors.items(), steps, strict=True):
            place = segment.bytes[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            found[name], end = place.copy_(tensor), end + step
        return found

    def allocation_of(self, tensor: torch.Tensor) -> SharedAllocation:
        (segment,) = (one for one in self.segments if 0 <= tensor.data_ptr() - one.bytes.data_ptr() < len(one.bytes))
        return SharedAllocation(segment.bytes.data_ptr(), segment.handle)


def mapped_refit(place: Place) -> object:
    """Five versions. Returns how many rounds of messages each took.

    At the second the sender's memory was given back and taken again, at the same addresses. Its tensors have new memory at
    the third, the receiver's at the fourth, and the sender's again at the fifth, memory that cannot be mapped.
    """
    plan, channel, memory = refit_plan(2, devices=("gpu", "gpu")), place.open(), SharedMemory()
    assert isinstance(channel, IpcChannel)
    if place.device == "cpu":
        ipc_memory.allocation_of = memory.allocation_of  # type: ignore[assignment]
    is_source, expected = sent_and_expected(2, place.rank)
    held = expected if is_source else reference.zeros_like(expected)

    def allocated(tensors: reference.Weights) -> reference.Weights:
        if place.device == "cpu":
            return memory.copies(tensors)
        return {name: tensor.to(place.device).clone() for name, tensor in tensors.items()}

    live = {name: torch.nn.Parameter(tensor) for name, tensor in allocated(held).items()}
    mine = plan.for_rank(place.rank)
    end = RefitReceiver(mine, live, channel) if place.rank else RefitSender(mine, live, channel, lends=True)
    rounds = []
    for version in range(1, 6):
        if version == 2 and isinstance(end, RefitSender):
            end.reclaim()
        if (version in (3, 5) and place.rank == 0) or (version == 4 and place.rank == 1):
            if isinstance(end, RefitSender):
                assert channel._table[1, BORROWED]
                end.reclaim()
                assert not channel._table[1, BORROWED]
            if version == 5:
                ipc_memory.allocation_of = lambda tensor: None
            for name, tensor in allocated({name: one.data for name, one in live.items()}).items():
                live[name].data = tensor
        _ = end.send(version) if isinstance(end, RefitSender) else end.receive(version)
        assert channel._loans._count == (0 if place.rank else (0, 1, 2, 3, 3, 3)[version])
        rounds.append(len(end.rounds.sends) + len(end.rounds.receives))
        if place.rank == 0:
            for parameter in live.values():
                parameter.data += 1
        else:
            shifted = {name: tensor + (version - 1) * (tensor != 0) for name, tensor in expected.items()}
            assert reference.equal({name: parameter.data.cpu() for name, parameter in live.items()}, shifted), version
    channel.close()
    return rounds
