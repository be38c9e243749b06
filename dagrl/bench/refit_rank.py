"""One rank of the refit benchmark: holds its side of a case, transfers it by every method, and checks the result.

All methods run in the same processes, over the same tensors. All ranks start at the same instant. After each turn every
element of a destination is compared with its expected value (`refit_sides.py`).
"""

import gc
import itertools
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.refit_control import Control
from dagrl.bench.refit_rivals import (
    PACKED_BYTES,
    RAW_BYTES,
    Broadcast,
    SharedBuffers,
    copied_bytes_per_second,
    raw_bytes_per_second,
)
from dagrl.bench.refit_sides import Side, clear, described, fill, megatron_model, modules_side, vllm_side, wrong
from dagrl.bench.refit_vllm_engines import VllmEngine
from dagrl.channels import ChannelSpec, open_channel
from dagrl.channels.base import MAILBOX_SLOTS
from dagrl.channels.spec import ChannelKind
from dagrl.refit import RefitReceiver, RefitSender, Verify, commit_together, plan_refit
from dagrl.refit.connect import device_name
from dagrl.refit.slices import WeightSlice
from dagrl.refit.transfers import move_bytes

PORTS = 3  # ports of a case: for the process groups of the train side and of both sides, and for the channel

TIMEOUT_S, WARMUP, PAUSES = 20.0, 2, 5


@dataclass
class Method:
    """One way to transfer the model: `act` does it once."""

    act: Callable[[], object]
    facts: Mapping[str, float] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None


class Rank:
    """One rank of cases that all have the same number of ranks and GPUs. These attributes are of the current one."""

    case: RefitCase
    is_sender: bool

    def __init__(self, rank: int, size: int, gpus: int, control_port: int, on_gpus: bool) -> None:
        self.rank, self.size, self._on_gpus = rank, size, on_gpus
        self.device = torch.device("cuda", rank % gpus) if on_gpus else torch.device("cpu")
        if on_gpus:
            torch.cuda.set_device(self.device)
        self.control = Control(control_port, rank, size, 4 * TIMEOUT_S)
        self._built: tuple[Any, Side] | None = None
        self._case = ExitStack()

    def begin(
        self, case: RefitCase, destinations: list[list[WeightSlice]], ports: Sequence[int], thorough: bool, rivals: bool
    ) -> list[str]:
        """Builds this rank's side and measures the link. Returns the names of the case's methods."""
        self._case.close()  # of a case that failed
        self.case, self.is_sender = case, self.rank < case.train.world_size
        self._destinations = destinations  # vLLM's are recorded in a process of their own, once for all ranks
        *self._group_addresses, address = (f"127.0.0.1:{port}" for port in ports)
        self._made: dict[str, Method] = {}
        self._makers: dict[str, Callable[[], Method]] = {}
        self._build_side()
        if self.is_sender:
            fill(self.side.tensors, self.side.slices)
        self.control.barrier()  # one side may take much longer to build
        kind: ChannelKind = "ipc" if case.colocated else "nccl" if self._on_gpus else "gloo"
        self.channel = open_channel(ChannelSpec(kind, address, self.rank, self.size, TIMEOUT_S))
        self._case.callback(self.channel.close)
        self._raw = self._raw_gb_per_s()
        self._offer("dagrl")
        if thorough:
            if case.colocated:  # as with memory that cannot be mapped, such as expandable segments
                self._offer("dagrl by messages")
            self._offer("dagrl verify=checksum", verify="checksum")
            if rivals and not case.fp8 and not (case.colocated and self.size > 2):
                self._offer_rivals()
        return list(self._makers)

    def turn(self, method: str, repeats: int) -> dict[str, Any]:
        """Transfers the model some times, and compares this rank's tensors with the expected values."""
        if method not in self._made:
            self._made[method] = self._makers[method]()
            self._case.callback(self._made[method].close)
        made, side = self._made[method], self.side
        if not self.is_sender:
            clear(side.tensors)
        seconds = self.control.seconds(made.act, repeats, WARMUP)
        received = () if self.is_sender else side.slices
        bad = wrong(side.tensors, received, self.case.aliases)
        into = sum(move_bytes(one.box, one.dtype or "bfloat16", one.scales is not None) for one in received)
        facts = {"bytes_into_rank": into, "raw_gb_per_s": self._raw, **made.facts}
        return {"seconds": seconds, "wrong": bad, "holder": side.holder, "facts": facts}

    def end(self) -> None:
        """Releases what the methods hold. The side stays for a next case that has the same."""
        self._made.clear()
        self._makers.clear()
        self._case.close()

    @property
    def side(self) -> Side:
        """This rank's side of the case."""
        assert self._built is not None
        return self._built[1]

    def _build_side(self) -> None:
        """Builds this rank's side, unless the last one is the same."""
        case, rank = self.case, self.rank % self.case.train.world_size
        sends = case.model, case.train, case.fsdp
        key = sends if self.is_sender else (case.model, case.tp, case.fp8, case.expert_parallel)
        if self._built is not None and self._built[0] == key:
            return
        self._let_go()
        if not self._on_gpus or (self.is_sender and case.fsdp):
            slices = (case.sources() + self._destinations)[self.rank]
            tensors = described(slices, self.device)
            if self.is_sender and case.fsdp:  # float32 shards, which are cast as they are packed or copied
                tensors = {name: tensor.float() for name, tensor in tensors.items()}
            side = Side(slices, tensors, "tensors of the described shapes")
        elif self.is_sender:
            model = megatron_model(case, case.train, rank, self._group_addresses[0], self.device)
            side = modules_side(case.sources()[rank], model)
        else:
            side = vllm_side(case, rank, self._destinations[rank], self.device)
        self._built = (key, side)

    def _let_go(self) -> None:
        self._built = None
        gc.collect()
        if self._on_gpus:
            torch.cuda.empty_cache()

    def _raw_gb_per_s(self) -> float:
        """Returns the channel's bandwidth between the busiest pairs; on one GPU, the bandwidth of copies."""
        half = self.case.train.world_size
        sizes = RAW_BYTES if self._on_gpus else (1 << 20,)
        if self.case.colocated:
            raw = copied_bytes_per_second(self.control, self.device, sizes)
        else:
            pairs = {rank: half + rank for rank in range(min(half, self.case.tp))}
            raw = raw_bytes_per_second(self.channel, self.control, pairs, self.device, sizes)
        return max(raw.values()) / 1e9

    def _offer(self, name: str, verify: Verify = "off") -> None:
        before = dict(self._makers)  # dagrl is the first side
        self._makers = {name: partial(self._refit, name, verify)} | before if name == "dagrl" else before
        self._makers.setdefault(name, partial(self._refit, name, verify))

    def _refit(self, name: str, verify: Verify) -> Method:
        case, devices = self.case, self.control.gather(device_name(self.device))
        mapped = case.colocated and name != "dagrl by messages"
        plan = plan_refit(
            case.sources(),
            self._destinations,
            dtype="bfloat16",
            aliases=case.aliases,
            mailboxes=case.colocated,
            devices=devices if mapped else (),
        )
        mine = plan.for_rank(self.rank, verify)
        end: RefitSender | RefitReceiver
        if self.is_sender:
            end = RefitSender(mine, self.side.tensors, self.channel, lends=True)
        else:
            end = RefitReceiver(mine, self.side.tensors, self.channel)
        sent = max((memory.bucket.nbytes for memory in end.rounds.sends), default=0)
        staging = end.rounds.staging_bytes + (MAILBOX_SLOTS * sent if case.colocated else 0)

        def carry() -> None:
            _ = end.send(1) if isinstance(end, RefitSender) else end.receive(1)

        self.control.barrier()
        carry()  # opens connections and compiles kernels
        return Method(carry, {"staging_bytes": staging, "pause_s": self._pause(carry)})

    def _pause(self, carry: Callable[[], object]) -> float:
        """Returns the median seconds that this generation rank pauses, including the commit.

        Modules without an engine have no hooks; `RefitReport.pause_s` of a run includes them and the engine's own work.
        """
        taken = []
        for _ in range(PAUSES):
            self.control.start_together()
            start = time.perf_counter()
            with commit_together(self.channel, wait=not self.is_sender):
                carry()
            taken.append(time.perf_counter() - start)
        return 0.0 if self.is_sender else sorted(taken)[PAUSES // 2]

    def _offer_rivals(self) -> None:
        """Offers broadcasts and, with one rank a side, vLLM's own weight transfers: from modules, and from weights that were
        exported before."""
        case, colocated = self.case, self.case.colocated
        has_loader = all(self.control.gather(self.is_sender or self.side.model is not None))
        shared = ("shared buffer a parameter", "packed shared buffers")
        names = shared if colocated else ("broadcast a parameter", "packed broadcast")
        rivals = [(names[0], 0, False), (names[1], PACKED_BYTES, False)]
        if "num_experts" in case.config:
            rivals = rivals[:1]  # 18,867 parameters: a loader's calls would take minutes, packing seconds to prepare
        elif has_loader:
            rivals += [(f"{method}, load_weights", size, True) for method, size, _ in rivals]
        kind, backend = (SharedBuffers, "ipc") if colocated else (Broadcast, "nccl")
        for name, size, load in rivals:
            make = partial(kind, case, self.side, self.control, self.device, size, load)
            self._makers[name] = partial(self._rival, make)
        if has_loader and self.size == 2:
            for name, packed, ready in (("", False, False), (" packed", True, False), (", exported before", False, True)):
                arguments = (self.device, backend, self._group_addresses[1], packed, ready)
                engine = partial(VllmEngine, case, self.side, self.control, *arguments)
                self._makers[f"vLLM {backend}{name}"] = partial(self._rival, engine)

    def _rival(self, make: Callable[[], Broadcast | VllmEngine]) -> Method:
        rival = make()
        return Method(rival.run, {"staging_bytes": rival.buffer_bytes}, rival.close)


def run_rank(pipe: Connection, rank: int, size: int, gpus: int, control_port: int, on_gpus: bool) -> None:
    """Runs one process of the benchmark: executes commands until the pipe is closed."""
    if rank < size // 2:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as in Megatron's workers
    torch.set_num_threads(1)
    mine: Rank | None = None
    for number in itertools.count():
        try:
            command, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # process groups and communicators may have peers that are gone
        try:
            mine = mine or Rank(rank, size, gpus, control_port, on_gpus)
            mine.control.begin(number)
            pipe.send(("", getattr(mine, command)(*arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
