"""The faults of the campaign, a table. A fault is a context manager over a run: applied at its start, undone at its end.

Each yields what it did, for the record. `lasts_s` is how long the campaign stays inside. What this machine cannot do raises
`CannotError` with the reason and is listed as skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.machine import Clock, Disk
    from tests.chaos.trial import Trial


class CannotError(Exception):
    """This machine cannot have the fault; the text says why."""


class NotNowError(Exception):
    """The run has no such process at this moment of its start."""


Applied = Callable[["Trial", Random], Iterator[str]]


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    `harmless`: the run must go on as if nothing had happened, without a restart. `noticed_s`: a fault is survived if the
    run goes on for so long (None: 12 s, or until the next step after a harmless fault). `changes`: the run's results
    may change, as samples fail.
    """

    name: str
    apply: Applied
    lasts_s: tuple[float, float] = (0.0, 0.0)
    harmless: bool = False
    noticed_s: float | None = None
    changes: bool = False
    scenarios: frozenset[str] = frozenset()  # empty: all

    @property
    def patience_s(self) -> float:
        """How long the run must go on."""
        return self.noticed_s if self.noticed_s is not None else 0.0 if self.harmless else 12.0

    def applied(self, trial: Trial, random: Random) -> AbstractContextManager[str]:
        """Applies the fault to a run for the block."""
        return contextmanager(self.apply)(trial, random)


def chosen(trial: Trial, target: str, random: Random) -> int:
    """One of the processes of a place. Raises NotNowError if there is none."""
    found = [trial.driver] if target == "driver" else trial.pids(target)
    if not found:
        raise NotNowError
    return random.choice(found)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def strike(target: str, number: signal.Signals) -> Applied:
    """SIGKILL, as of an operator or the kernel, or SIGSTOP without SIGCONT: the process hangs."""

    def apply(trial: Trial, random: Random) -> Iterator[str]:
        pid = chosen(trial, target, random)
        send(pid, number)
        yield f"pid {pid}"

    return apply


def pause(target: str) -> Applied:
    """SIGSTOP, and SIGCONT at the end: a process that is late."""

    def apply(trial: Trial, random: Random) -> Iterator[str]:
        pid = chosen(trial, target, random)
        send(pid, signal.SIGSTOP)
        try:
            yield f"pid {pid}"
        finally:
            send(pid, signal.SIGCONT)

    return apply


def suspend(trial: Trial, random: Random) -> Iterator[str]:
    """SIGSTOP of every process of the run, and SIGCONT: a machine that slept, for which all clocks have jumped."""
    pids = trial.pids("")
    for pid in pids:
        send(pid, signal.SIGSTOP)
    try:
        yield f"{len(pids)} processes"
    finally:
        for pid in reversed(pids):
            send(pid, signal.SIGCONT)


def ask(*numbers: signal.Signals) -> Applied:
    """Signals to the driver, as of a person or a batch system."""

    def apply(trial: Trial, random: Random) -> Iterator[str]:
        for number in numbers:
            send(trial.driver, number)
            time.sleep(random.uniform(0.0, 1.0))
        yield f"pid {trial.driver}"

    return apply


def full(trial: Trial, random: Random) -> Iterator[str]:
    """No byte is left on the disk of the run's directory."""
    with _disk(trial).full():
        yield "0 bytes left"


def slow(trial: Trial, random: Random) -> Iterator[str]:
    """Writes to the disk of the run's directory wait."""
    with _disk(trial).frozen():
        yield "writes wait"


def refuses(trial: Trial, random: Random) -> Iterator[str]:
    """Nothing can be created or renamed in the directory of checkpoints."""
    with _disk(trial).immutable(trial.directory / "checkpoints"):
        yield "no new files"


def _disk(trial: Trial) -> Disk:
    if trial.disk is None:
        raise CannotError("needs root and a loop device, for a disk of its own")
    return trial.disk


def _clock(trial: Trial) -> Clock:
    if trial.clock is None:
        raise CannotError("needs a C compiler, for a clock of its own")
    return trial.clock


def clock_jumps(trial: Trial, random: Random) -> Iterator[str]:
    """Sets the wall clock an hour or a day ahead or behind, and then right again; between two hosts, that of the second."""
    seconds = random.choice((-86400, -3600, 3600, 86400))
    with _clock(trial).ahead(seconds):
        yield f"{seconds:+d} s"


def clock_runs_fast(trial: Trial, random: Random) -> Iterator[str]:
    """Lets an hour to a day of the wall clock pass in a few seconds."""
    times = random.choice((1000, 10000))
    with _clock(trial).fast(times):
        yield f"{times} times as fast"


def misbehaves(how: str) -> Applied:
    """Makes the user's function (`task.py`) raise, hang or end its process, for all samples or for some."""

    def apply(trial: Trial, random: Random) -> Iterator[str]:
        share = random.choice((0.2, 1.0))
        trial.conduct.write_text(f"{how} {share}")
        try:
            yield f"{how} for {share:.0%} of samples"
        finally:
            trial.conduct.write_text("")

    return apply


MEMORY = Path("/sys/fs/cgroup/memory")


def out_of_memory(target: str) -> Applied:
    """Puts a process into a cgroup without memory: the kernel kills it at its next page."""

    def apply(trial: Trial, random: Random) -> Iterator[str]:
        if not os.access(MEMORY / "tasks", os.W_OK):
            raise CannotError(f"needs a writable {MEMORY} (cgroup v1)")
        pid = chosen(trial, target, random)
        group = MEMORY / f"dagrl-chaos-{os.getpid()}-{pid}"
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(1 << 20))
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
            yield f"pid {pid}"
        finally:
            _removed(group)

    return apply


def _removed(group: Path) -> None:
    """Removes a cgroup; what still runs in it moves to its parent."""
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (MEMORY / "cgroup.procs").write_text(pid)
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


SECOND_S = 120.0


def second_run(trial: Trial, random: Random) -> Iterator[str]:
    """Starts the same command once more: it must be refused, and the first run must not notice."""
    with trial.second() as process:
        try:
            text, _ = process.communicate(timeout=SECOND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"the second run was not refused within {SECOND_S:g} s") from None
    assert process.returncode == 2, text
    assert text.count("dagrl: error:") == 1 and "is in use by" in text and "Traceback" not in text, text
    yield "refused with exit code 2"


def packets(**how: float) -> Applied:
    """Packets between the hosts: `loss`, `delay_s`, `reorder` and `corrupt`, or none at all (`loss=1`)."""

    def apply(trial: Trial, random: Random) -> Iterator[str]:
        if trial.relay is None:
            raise CannotError("the run has one host")
        with trial.relay.disturbed(**how):
            yield ", ".join(f"{name} {value:g}" for name, value in how.items())

    return apply


GRPO = frozenset({"grpo", "async", "turns"})
REWARDED = frozenset({"grpo", "async"})
TURNS = frozenset({"turns"})
ONE_HOST = frozenset({"sft", *GRPO})
TWO_HOSTS = frozenset({"two hosts"})

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("SIGKILL train worker", strike("train worker", signal.SIGKILL)),
        Fault("SIGKILL generation worker", strike("generation worker", signal.SIGKILL), scenarios=GRPO),
        Fault("SIGKILL reward", strike("reward", signal.SIGKILL), scenarios=REWARDED, harmless=True),
        Fault("SIGKILL environment", strike("environment", signal.SIGKILL), scenarios=TURNS, harmless=True),
        Fault("SIGKILL raylet", strike("raylet", signal.SIGKILL), scenarios=ONE_HOST),
        Fault("SIGKILL GCS", strike("GCS", signal.SIGKILL), scenarios=ONE_HOST, noticed_s=90.0),
        Fault("SIGKILL runtime-env agent", strike("runtime-env agent", signal.SIGKILL), scenarios=ONE_HOST, noticed_s=30.0),
        Fault("SIGKILL driver", strike("driver", signal.SIGKILL)),
        Fault("SIGSTOP train worker for a while", pause("train worker"), (0.5, 4.0), harmless=True),
        Fault(
            "SIGSTOP generation worker for a while", pause("generation worker"), (0.5, 4.0), harmless=True, scenarios=GRPO
        ),
        Fault("SIGSTOP reward for a while", pause("reward"), (0.5, 4.0), harmless=True, scenarios=REWARDED),
        Fault("SIGSTOP environment for a while", pause("environment"), (0.5, 4.0), harmless=True, scenarios=TURNS),
        Fault("SIGSTOP raylet for a while", pause("raylet"), (0.5, 8.0), harmless=True, scenarios=ONE_HOST),
        Fault("SIGSTOP GCS for a while", pause("GCS"), (0.5, 8.0), harmless=True, scenarios=ONE_HOST),
        Fault("SIGSTOP driver for a while", pause("driver"), (0.5, 4.0), harmless=True),
        Fault("SIGSTOP all for a while", suspend, (1.0, 8.0), harmless=True, scenarios=ONE_HOST),
        Fault("SIGSTOP train worker", strike("train worker", signal.SIGSTOP)),
        Fault("SIGSTOP generation worker", strike("generation worker", signal.SIGSTOP), scenarios=GRPO),
        Fault("SIGSTOP reward", strike("reward", signal.SIGSTOP), harmless=True, noticed_s=30.0, scenarios=REWARDED),
        Fault("SIGSTOP environment", strike("environment", signal.SIGSTOP), harmless=True, noticed_s=30.0, scenarios=TURNS),
        Fault("SIGSTOP raylet", strike("raylet", signal.SIGSTOP), scenarios=ONE_HOST),
        Fault("SIGSTOP GCS", strike("GCS", signal.SIGSTOP), noticed_s=60.0, scenarios=ONE_HOST),
        Fault("reward raises", misbehaves("raise"), (0.5, 3.0), changes=True, scenarios=REWARDED),
        Fault("reward hangs", misbehaves("hang"), (5.0, 15.0), changes=True, scenarios=REWARDED),
        Fault("reward ends its process", misbehaves("end"), (0.5, 3.0), changes=True, scenarios=REWARDED),
        Fault("environment raises", misbehaves("raise"), (0.5, 3.0), changes=True, scenarios=TURNS),
        Fault("environment hangs", misbehaves("hang"), (5.0, 15.0), changes=True, scenarios=TURNS),
        Fault("environment ends its process", misbehaves("end"), (0.5, 3.0), changes=True, scenarios=TURNS),
        Fault("SIGINT", ask(signal.SIGINT)),
        Fault("SIGTERM", ask(signal.SIGTERM)),
        Fault("SIGTERM twice", ask(signal.SIGTERM, signal.SIGTERM)),
        Fault("disk full", full, (1.0, 5.0), scenarios=ONE_HOST),
        Fault("disk slow", slow, (0.5, 5.0), harmless=True, scenarios=ONE_HOST),
        Fault("directory read-only", refuses, (1.0, 5.0), scenarios=ONE_HOST),
        Fault("out of memory: train worker", out_of_memory("train worker"), (3.0, 5.0)),
        Fault("out of memory: generation worker", out_of_memory("generation worker"), (3.0, 5.0), scenarios=GRPO),
        Fault("clock jumps", clock_jumps, (1.5, 5.0), harmless=True),
        Fault("clock runs fast", clock_runs_fast, (3.0, 8.0), harmless=True),
        Fault("second run in the directory", second_run, harmless=True),
        Fault("packets lost", packets(loss=0.05), (2.0, 6.0), harmless=True, scenarios=TWO_HOSTS),
        Fault("packets late", packets(delay_s=0.05), (2.0, 6.0), harmless=True, scenarios=TWO_HOSTS),
        Fault("packets reordered", packets(reorder=0.2, delay_s=0.01), (2.0, 6.0), harmless=True, scenarios=TWO_HOSTS),
        Fault("packets corrupt", packets(corrupt=0.05), (2.0, 6.0), harmless=True, scenarios=TWO_HOSTS),
        Fault("no packet for a while", packets(loss=1.0), (1.0, 4.0), harmless=True, scenarios=TWO_HOSTS),
        Fault("no packet for long", packets(loss=1.0), (40.0, 40.0), scenarios=TWO_HOSTS),
    )
}
