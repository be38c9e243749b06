"""One rank of the refit benchmark: holds its side of every case, transfers it by every method, and checks the result.

All methods run in the same processes, over the same tensors. All ranks start at the same instant, and the slowest counts.
After each method, every element of a destination is compared with its expected value (`refit_truth.py`).
"""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dagrl.bench.deadline import TIME_IS_UP, BenchDeadline
from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.refit_control import Control
from dagrl.bench.refit_report import PartTimes
from dagrl.bench.refit_rivals import (
    PACKED_BYTES,
    RAW_BYTES,
    Broadcast,
    SharedBuffers,
    copied_bytes_per_second,
    raw_bytes_per_second,
)
from dagrl.bench.refit_sides import Side, leave_vllm, megatron_model, modules_side, vllm_side
from dagrl.bench.refit_truth import clear, described, fill, wrong
from dagrl.bench.refit_vllm_engines import VllmEngine
from dagrl.bench.report import Row
from dagrl.channels import Channel, ChannelSpec, open_channel
from dagrl.channels.base import MAILBOX_SLOTS
from dagrl.channels.spec import ChannelKind
from dagrl.refit import RecordMode, RefitReceiver, RefitSender, Verify, commit_together, plan_refit
from dagrl.refit.carry.autotune import TRIALS
from dagrl.refit.connect import device_name
from dagrl.refit.slices import WeightSlice
from dagrl.refit.transfers import move_bytes
from dagrl.runtime.annotate import disable_ranges, enable_ranges

if TYPE_CHECKING:
    from dagrl.bench.refit_resharding import Resharding

PORTS_A_CASE = 4
"""Ports for the process groups of the train side, of a Megatron generation side, and of both; and for the channel."""

FIRST_REFITS = 1 + 2 * TRIALS
"""Refits of one end until it has opened its connections and chosen the faster method."""

SayRow = Callable[[Row], None]


@dataclass(frozen=True)
class Settings:
    """Settings of all ranks; `ports` holds `PORTS_A_CASE` ports per case."""

    cases: Sequence[RefitCase]
    on_gpus: bool  # with real modules
    rounds: int
    control_port: int
    ports: Sequence[int]
    bucket_bytes: int | None = None
    direct_bytes: int | None = None
    timeout_s: float = 20.0
    rivals: bool = True
    until: float = math.inf  # on the monotonic clock, which a host's processes share: methods end before it


class Rank:
    """One rank of cases that all have the same number of ranks and GPUs. These attributes are of the current one."""

    case: RefitCase
    is_sender: bool
    facts: Row

    def __init__(self, settings: Settings, rank: int, say: SayRow) -> None:
        self.settings, self.rank = settings, rank
        first = settings.cases[0]
        self.size = first.ranks
        self.device = torch.device("cuda", rank % first.gpus) if settings.on_gpus else torch.device("cpu")
        if settings.on_gpus:
            torch.cuda.set_device(self.device)
        self.control = Control(settings.control_port, rank, self.size, 4 * settings.timeout_s)
        self._group_addresses: list[str] = []
        self._channel_address = ""
        self._say_row = say if rank == 0 else lambda row: None
        self._built: tuple[Any, Side] | None = None
        self._deadline = BenchDeadline(settings.until - time.monotonic())

    def run(self) -> None:
        """Runs all cases; a case that fails is reported and skipped."""
        for number, case in enumerate(self.settings.cases):
            self.case, self.is_sender = case, self.rank < case.train.world_size
            ports = self.settings.ports[PORTS_A_CASE * number :][:PORTS_A_CASE]
            *self._group_addresses, self._channel_address = (f"127.0.0.1:{port}" for port in ports)
            self._try("all methods", self._run_case)
        self.control.leave()

    def _say(self, **found: Any) -> None:
        self._say_row({"name": self.case.name, "dtype": self.case.dtype, **found})

    def _try(self, method: str, act: Callable[[], object]) -> None:
        """Calls `act` unless any rank lacks the time, which is reported. Rank 0 reports the errors of all ranks, and all
        continue. No rank waits longer than the deadlines allow."""
        if not all(self.control.gather(self._deadline.allows(method))):
            self._say(method=method, left_out=TIME_IS_UP)
            return
        error = ""
        try:
            act()
        except Exception:
            error = f"rank {self.rank}: {traceback.format_exc()}"
        errors = [one for one in self.control.gather(error) if one]
        if errors:
            self._say(method=method, error="\n".join(errors))

    def _run_case(self) -> None:
        started = time.perf_counter()
        if self.case.to_megatron:
            self._run_resharding()
            return
        self._build_side()
        self._fill()
        self._say(note=f"built in {time.perf_counter() - started:.1f} s")
        kind = (self.case.model, self.case.fp8, False)
        first = next(one for one in self.settings.cases if (one.model, one.fp8, one.to_megatron) == kind)
        self._measure(thorough=self.case == first)

    def _fill(self) -> None:
        if self.is_sender:
            fill(self.side.tensors, self.side.slices)

    def _run_resharding(self) -> None:
        from dagrl.bench.refit_resharding import Resharding

        self._let_go()
        leave_vllm()
        resharding = Resharding(self.case, self.rank, self._group_addresses, self.device, 4 * self.settings.timeout_s)
        try:
            self._built = ("resharding", resharding.side)
            self._fill()
            self._measure(thorough=False)
            self.facts = {}
            self._try("megatron.core.resharding", partial(self._reshard, resharding))
        finally:
            resharding.close()
            del resharding
            self._let_go()

    def _reshard(self, resharding: Resharding) -> None:
        self._time("megatron.core.resharding", resharding.swap())

    @property
    def side(self) -> Side:
        """This rank's side of the case."""
        assert self._built is not None
        return self._built[1]

    def _build_side(self) -> None:
        """Builds this rank's side, unless the last one is the same."""
        case, rank = self.case, self.rank % self.case.train.world_size
        key = (case.model, case.train) if self.is_sender else (case.model, case.tp, case.fp8, case.expert_parallel)
        if self._built is not None and self._built[0] == key:
            return
        self._let_go()
        if not self.settings.on_gpus:
            slices = (case.sources() + case.destinations())[self.rank]
            side = Side(slices, described(slices, self.device), "tensors of the described shapes")
        elif self.is_sender:
            model = megatron_model(case, case.train, rank, self._group_addresses[0], self.device)
            side = modules_side(case.sources()[rank], model)
        else:
            side = vllm_side(case, rank, self.device)
        self._built = (key, side)

    def _let_go(self) -> None:
        self._built = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        kind: ChannelKind = "ipc" if self.case.colocated else "nccl" if self.settings.on_gpus else "gloo"
        channel = open_channel(ChannelSpec(kind, self._channel_address, self.rank, self.size, self.settings.timeout_s))
        try:
            yield channel
        finally:
            channel.close()

    def _measure(self, thorough: bool) -> None:
        """Runs the methods of the case: the default and, if `thorough`, recorded and not recorded, verified, and rivals."""
        self.control.barrier()  # one side may take much longer to build
        colocated = self.case.colocated
        with self._channel() as channel:
            self.facts = {**self._raw(channel), "holders": sorted(set(self.control.gather(self.side.holder)))}
            methods: list[tuple[str, Verify, RecordMode]] = [("dagrl", "off", "auto")]
            if thorough and self.device.type == "cuda" and not colocated:  # only NCCL messages can be recorded
                methods += [("dagrl CUDA graph", "off", True), ("dagrl launches", "off", False)]
            if thorough and colocated:  # as with memory that cannot be mapped, such as expandable segments
                methods += [("dagrl by messages", "off", "auto")]
            if thorough:
                methods += [("dagrl verify=checksum", "checksum", "auto"), ("dagrl verify=bitwise", "bitwise", "auto")]
            for method, verify, record in methods:
                self._try(method, partial(self._refit, channel, method, verify, record))
        if thorough and self.settings.rivals and not self.case.fp8 and not (colocated and self.size > 2):
            self._measure_rivals()

    def _measure_rivals(self) -> None:
        """Runs broadcasts and, with one rank a side, vLLM's own weight transfers: from modules, and from weights that were
        exported before."""
        colocated = self.case.colocated
        has_loader = all(self.control.gather(self.is_sender or self.side.model is not None))
        shared = ("shared buffer a parameter", "packed shared buffers")
        names = shared if colocated else ("broadcast a parameter", "packed broadcast")
        rivals = [(names[0], 0, False), (names[1], PACKED_BYTES, False)]
        if "num_experts" in self.case.config:
            rivals = rivals[:1]  # 18,867 parameters: a loader's calls would take minutes, packing seconds to prepare
        elif has_loader:
            rivals += [(f"{method}, load_weights", size, True) for method, size, _ in rivals]
        kind, backend = (SharedBuffers, "ipc") if colocated else (Broadcast, "nccl")
        for method, size, load in rivals:
            make = partial(kind, self.case, self.side, self.control, self.device, size, load)
            self._try(method, partial(self._time_rival, method, make))
        if not has_loader or self.size != 2:
            return
        for name, packed, ready in (
            ("", False, False),
            (" packed", True, False),
            (", weights exported before", False, True),
        ):
            address, method = self._group_addresses[2], f"vLLM {backend}{name}"
            engine = partial(VllmEngine, self.case, self.side, self.control, self.device, backend, address, packed, ready)
            self._try(method, partial(self._time_rival, method, engine))

    def _time_rival(self, method: str, make: Callable[[], Broadcast | VllmEngine]) -> None:
        rival = make()
        try:
            self._time(method, rival.run, repeats=3, warmup=1, staging_bytes=max(self.control.gather(rival.buffer_bytes)))
        finally:
            rival.close()

    def _raw(self, channel: Channel) -> Row:
        """Measures the channel's raw bandwidth between the busiest pairs; on one GPU, the bandwidth of copies."""
        half = self.case.train.world_size
        pairs = {rank: half + rank % self.case.tp for rank in range(half)}
        sizes = RAW_BYTES if self.device.type == "cuda" else (1 << 20,)
        if self.case.colocated:
            raw = copied_bytes_per_second(self.control, self.device, sizes)
        else:
            raw = raw_bytes_per_second(channel, self.control, pairs, self.device, sizes)
        return {
            "raw_gb_per_s": max(raw.values()) / 1e9,
            "raw_by_message_bytes": {str(size): rate / 1e9 for size, rate in raw.items()},
        }

    def _refit(self, channel: Channel, method: str, verify: Verify, record: RecordMode) -> None:
        case, devices = self.case, self.control.gather(device_name(self.device))
        start = time.perf_counter()
        plan = plan_refit(
            case.sources(),
            case.destinations(),
            dtype="bfloat16",
            aliases=case.aliases,
            bucket_bytes=self.settings.bucket_bytes,
            direct_bytes=self.settings.direct_bytes,
            mailboxes=case.colocated,
            devices=devices if case.colocated and method != "dagrl by messages" else (),
        )
        mine, planned = plan.for_rank(self.rank, verify, record), time.perf_counter()
        end: RefitSender | RefitReceiver
        if self.is_sender:
            end = RefitSender(mine, self.side.tensors, channel, lends=True)
        else:
            end = RefitReceiver(mine, self.side.tensors, channel)
        prepared = time.perf_counter()
        spares = 2 * max((bucket.nbytes for bucket in mine.receives), default=0) if verify == "bitwise" else 0
        sent = max((memory.bucket.nbytes for memory in end.rounds.sends), default=0)
        mailboxes = MAILBOX_SLOTS * sent if case.colocated else 0

        def carry() -> None:
            _ = end.send(1) if isinstance(end, RefitSender) else end.receive(1)

        more: Row = {
            "staging_bytes": max(self.control.gather(end.rounds.staging_bytes + spares + mailboxes)),
            "bucket_bytes": max(bucket.nbytes for bucket in (*mine.sends, *mine.receives)),
            "packed_bytes": max(self.control.gather(sum(memory.staged_bytes for memory in end.rounds.sends))),
            "unpacked_bytes": max(self.control.gather(sum(memory.staged_bytes for memory in end.rounds.receives))),
            "rounds": plan.summary().rounds,
            "plan_s": planned - start,
            "prepare_s": prepared - planned,
        }
        if verify == "off":
            more |= self._stages(end, channel)
        for _ in range(FIRST_REFITS):
            self.control.barrier()
            carry()
        more["pause_s"], more["pause_parts_s"] = self._pause(channel, carry, end)
        if case.colocated and verify == "off":
            more["pause_moved_s"], more["pause_moved_parts_s"] = self._pause(channel, carry, end, moved=True)
        rounds = self.settings.rounds
        self._time(method, carry, repeats=rounds if verify == "off" else min(rounds, 5), **more)

    def _pause(
        self, channel: Channel, carry: Callable[[], object], end: RefitSender | RefitReceiver, moved: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Returns the seconds that a generation rank pauses, including the commit, and those of its parts: the median of the
        slowest rank.

        With `moved` a sender's tensors get new memory before each refit, as by offloading them. Modules without an engine
        have no hooks; `RefitReport.pause_s` includes them and the engine's own work.
        """
        receives = not self.is_sender
        taken = []
        for _ in range(5):
            parts = PartTimes()
            if moved and isinstance(end, RefitSender):
                end.reclaim()
                for tensor in self.side.tensors.values():
                    tensor.data = tensor.data.clone()
            self.control.start_together()
            start = time.perf_counter()
            enable_ranges(opens=parts)
            with commit_together(channel, wait=receives):
                carry()
            spent = time.perf_counter() - start if receives else 0.0
            disable_ranges()
            taken.append(max(self.control.gather((spent, dict(parts.seconds))), key=lambda one: one[0]))
        return sorted(taken, key=lambda one: one[0])[len(taken) // 2]

    def _stages(self, end: RefitSender | RefitReceiver, channel: Channel) -> dict[str, float]:
        """Returns the seconds of packing, messages and unpacking, each alone, of the slowest rank."""
        if self.device.type != "cuda" or not any(self.control.gather(len(end.rounds.sends))):
            return {}

        def pack() -> None:
            for memory in end.rounds.sends:
                memory.pack()

        def unpack() -> None:
            for memory in end.rounds.receives:
                memory.unpack()

        def wire() -> None:
            end.rounds.run_wire()
            channel.synchronize()

        seconds = self._event_seconds(pack), self._event_seconds(unpack)
        wire()
        taken = self.control.seconds(wire, rounds=3, warmup=1)
        alone = self.control.gather(seconds)
        return {"pack_s": max(p for p, _ in alone), "wire_s": taken[1], "unpack_s": max(u for _, u in alone)}

    def _event_seconds(self, act: Callable[[], object]) -> float:
        """Returns the seconds by CUDA events, after one warm-up call."""
        act()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        act()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def _time(
        self, method: str, carry: Callable[[], object], repeats: int | None = None, warmup: int = 3, **more: Any
    ) -> None:
        """Measures `carry`, checks the result and reports the row."""
        side, is_receiver = self.side, not self.is_sender
        if is_receiver:
            clear(side.tensors)
        taken = self.control.seconds(carry, repeats or self.settings.rounds, warmup)
        bad = wrong(side.tensors, side.slices, self.case.aliases) if is_receiver else []
        wanted = max(self.control.gather(_bytes(side.slices) if is_receiver else 0))
        median = taken[len(taken) // 2]
        row = {
            "method": method,
            "gpus": self.case.gpus,
            "bytes_into_rank": wanted,
            "median_s": median,
            "p90_s": taken[min(len(taken) - 1, int(0.9 * len(taken)))],
            "min_s": taken[0],
            "max_s": taken[-1],
            "n": len(taken),
            "gb_per_s": wanted / median / 1e9,
            **self.facts,
            **more,
            "wrong_parameters": sum(map(len, self.control.gather(bad))),
        }
        if "raw_gb_per_s" in row:
            row["share_of_raw"] = row["gb_per_s"] / row["raw_gb_per_s"]
        self._say(**row)


def _bytes(slices: Sequence[WeightSlice]) -> int:
    """Returns the bytes a destination holds."""
    return sum(move_bytes(held.box, held.dtype or "bfloat16", held.scales is not None) for held in slices)


def run_rank(settings: Settings, rank: int, connection: Any) -> None:
    """Runs one process of the benchmark and sends its rows to `connection`."""
    if rank < settings.cases[0].train.world_size:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as in Megatron's workers
    torch.set_num_threads(1)
    try:
        Rank(settings, rank, connection.send).run()
    except Exception:
        connection.send({"rank": rank, "error": traceback.format_exc()})
    connection.send(None)
