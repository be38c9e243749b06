"""Refits between processes outside a `WorkerGroup`, such as torchrun's or a vLLM server's, which meet at one address.

    plan, channel = meet(Meeting("10.0.0.1:29600", "train", rank, size), slices, dtype="bfloat16")     # on each trainer rank
    plan, channel = meet(Meeting("10.0.0.1:29600", "generation", rank, size), slices)                  # on each engine rank
    sender = RefitSender(plan, tensors, open_channel(channel))                                         # or RefitReceiver

Train rank 0 serves the address, plans the refit and tells every rank its part. Neither Ray nor a process group is needed.
"""

from __future__ import annotations

import importlib
import io
import pickle
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dagrl.channels.spec import ChannelSpec
from dagrl.errors import ChannelError, DagrlError, RunError, error_text
from dagrl.refit.connect import choose_kind, device_name, plan_between
from dagrl.refit.plan.planner import RefitPlan
from dagrl.refit.slices import WeightSlice
from dagrl.refit.transfers import RankPlan, Verify
from dagrl.runtime.store import open_tcp_store, reserve_port

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

Side = Literal["train", "generation"]
T = TypeVar("T")

_MODULES = ("dagrl.refit.slices", "dagrl.refit.transfers", "dagrl.channels.spec", "dagrl.errors")
"""Anyone on the network may write to the store, so messages name only dataclasses and errors of these."""

POLL_S = 0.05
"""Seconds between looks of train rank 0 for missing ranks."""


@dataclass(frozen=True)
class Meeting:
    """Where a process meets the others, and which of them it is: rank `rank` of the `size` ranks of its side.

    `address` is a free `host:port` on the host of train rank 0. `timeout_s` limits the meeting and every wait of a refit.
    """

    address: str
    side: Side
    rank: int
    size: int
    timeout_s: float = 60.0

    @property
    def leads(self) -> bool:
        """Whether this process serves the address and plans."""
        return self.side == "train" and self.rank == 0


def meet(
    meeting: Meeting,
    slices: Sequence[WeightSlice],
    *,
    device: torch.device | None = None,
    dtype: str = "",
    target_dtype: str | None = None,
    tied_embeddings: bool = False,
    verify: Verify = "off",
    while_waiting: Callable[[], object] = lambda: None,
) -> tuple[RankPlan, ChannelSpec]:
    """Returns this rank's plan and its end of the channel. Call it in all processes of both sides at once.

    `slices` are what the rank holds, `device` where (None: the CPU). The other arguments are those of train rank 0; see
    `Refit.connect`. `while_waiting` is called repeatedly while ranks of the engine are missing, and may raise to give up on
    all train ranks. Raises ChannelError if a process does not come in time or two come as one rank, RefitPlanError on all
    ranks if no plan exists.
    """
    store = _open(meeting)
    try:
        if store.add(f"taken/{meeting.side}/{meeting.rank}", 1) > 1:
            raise ChannelError(
                f"another process met at {meeting.address} as {meeting.side} rank {meeting.rank} of {meeting.size}; give "
                "each process a rank of its own. Engines that know nothing of each other need an address and a trainer each"
            )
        here = (tuple(slices), socket.gethostname(), device_name(device))
        store.set(f"{meeting.side}/size", str(meeting.size))
        store.set(f"{meeting.side}/{meeting.rank}", write_message(here))  # type: ignore[arg-type]
        if meeting.leads:
            between = partial(plan_between, dtype=dtype, target_dtype=target_dtype, tied_embeddings=tied_embeddings)
            _plan(meeting, store, between, verify, while_waiting)
        message = read_message(store.get(f"plan/{meeting.side}/{meeting.rank}"), "train rank 0")
        store.set(f"read/{meeting.side}/{meeting.rank}", "")
        if meeting.leads:  # the store ends with this process's object
            store.wait([f"read/{side}/{rank}" for side, rank in _ranks(store, meeting) if store.check([f"{side}/{rank}"])])
    except (RuntimeError, TimeoutError) as error:
        raise ChannelError(
            f"{meeting.side} rank {meeting.rank} of {meeting.size} did not meet the others at {meeting.address} within "
            f"{meeting.timeout_s:g} s ({error}); start all train and generation ranks, with the same address"
        ) from error
    if isinstance(message, Exception):
        del store  # the traceback would keep it open
        raise message
    answer: tuple[RankPlan, ChannelSpec] = message
    return answer


def _open(meeting: Meeting) -> TCPStore:
    host, _, port = meeting.address.rpartition(":")
    limit = timedelta(seconds=meeting.timeout_s)
    try:
        return open_tcp_store(host, int(port), None, serves=meeting.leads, timeout=limit, waits=False)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise ChannelError(
            f"{meeting.side} rank {meeting.rank} cannot reach {meeting.address!r} ({error}); expected host:port of train "
            "rank 0"
        ) from error


def _plan(
    meeting: Meeting,
    store: TCPStore,
    between: Callable[..., RefitPlan],
    verify: Verify,
    while_waiting: Callable[[], object],
) -> None:
    """Plans with what all ranks hold, and tells each its part, or all the error."""
    answers: list[object]
    try:
        ranks = _wait_for_all(store, meeting, while_waiting)
        here = [read_message(store.get(f"{side}/{rank}"), f"{side} rank {rank}") for side, rank in ranks]
        hosts = [list(dict.fromkeys(host for _, host, _ in here)).index(host) for _, host, _ in here]
        devices = [device for _, _, device in here]
        kind, slices = choose_kind(devices), [part for part, _, _ in here]
        plan = between(slices[: meeting.size], slices[meeting.size :], hosts, devices, kind)
        address = f"{meeting.address.rpartition(':')[0]}:{reserve_port()}"
        specs = [ChannelSpec(kind, address, rank, plan.size, meeting.timeout_s) for rank in range(plan.size)]
        answers = [(plan.for_rank(rank, verify), specs[rank]) for rank in range(plan.size)]
    except Exception as error:
        ranks = _ranks(store, meeting)
        answers = [error.with_traceback(None)] * len(ranks)
    for (side, rank), part in zip(ranks, answers, strict=True):
        store.set(f"plan/{side}/{rank}", write_message(part))  # type: ignore[arg-type]


def _ranks(store: TCPStore, meeting: Meeting) -> list[tuple[str, int]]:
    """Returns all ranks; only the first generation rank while none has arrived."""
    size = int(store.get("generation/size")) if store.check(["generation/size"]) else 1
    return [*(("train", rank) for rank in range(meeting.size)), *(("generation", rank) for rank in range(size))]


def _wait_for_all(store: TCPStore, meeting: Meeting, while_waiting: Callable[[], object]) -> list[tuple[str, int]]:
    """Returns all ranks when they have come. Raises ChannelError with those that have not by the deadline."""
    until = time.monotonic() + meeting.timeout_s
    while missing := [(side, rank) for side, rank in _ranks(store, meeting) if not store.check([f"{side}/{rank}"])]:
        if missing[0][0] == "generation":  # all train ranks are here, and are told if this raises
            while_waiting()
        if time.monotonic() > until:
            raise ChannelError(
                f"{', '.join(f'{side} rank {rank}' for side, rank in missing)} did not meet train rank 0 at "
                f"{meeting.address} within {meeting.timeout_s:g} s; start all train and generation ranks, with this address"
            )
        time.sleep(POLL_S)
    return _ranks(store, meeting)


def while_called(work: Callable[[Callable[[], None]], T], calls: Sequence[Callable[[], object]]) -> T:
    """Returns what `work` returns, while another thread makes the calls. Raises the error of either.

    `work` gets a function that raises the error of a call that has failed.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(call) for call in calls]

        def check() -> None:
            for call_result in pending:
                if call_result.done():
                    call_result.result()

        result = work(check)
        for call_result in pending:
            call_result.result()
    return result


def write_message(value: object) -> bytes:
    """Returns `value` as a message. An error that is not dagrl's becomes a RunError with its text."""
    if isinstance(value, Exception) and type(value).__module__ != DagrlError.__module__:
        value = RunError(error_text(value))
    content = pickle.dumps(value)
    return zlib.crc32(content).to_bytes(4) + content


def read_message(message: bytes, sender: str) -> Any:
    """Returns what `write_message` was given. Raises ChannelError for any other message; `sender` is named in it.

    A damaged pickle may ask for any amount of memory, so its checksum comes first.
    """
    try:
        if zlib.crc32(message[4:]).to_bytes(4) != message[:4]:
            raise pickle.UnpicklingError("its checksum differs")
        return _PlanUnpickler(io.BytesIO(message[4:])).load()
    except Exception as error:  # unpickling a foreign message may raise anything
        raise ChannelError(
            f"the message of {sender} is not one of dagrl ({error_text(error)}); look for another process that writes to "
            "this address, and for another version of dagrl"
        ) from error


class _PlanUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        kind = getattr(importlib.import_module(module), name, None) if module in _MODULES else None
        if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, DagrlError)):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}")
