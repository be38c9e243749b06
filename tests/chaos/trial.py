"""One run under faults: started, disturbed, started once more where it stopped; is it like an undisturbed one at its end?"""

import math
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from tests.chaos.faults import Fault
from tests.chaos.machine import Clock, Disk, damaged
from tests.chaos.network import Cluster, Relay
from tests.chaos.scenarios import Scenario
from tests.chaos.task import CONDUCT
from tests.integration.main_job import OF_REPLAYS, SHARED_MEMORY, Metrics, Run, steps_of, untimed
from tests.integration.processes import command_line

HANG_S = 180.0  # longer than all deadlines that come one after the other in a scenario, on a busy machine

GONE_S = 30.0
START_S = 15.0
STARTING, DAMAGED = 0.3, 0.5
"""Shares of stops after which the next fault comes during the new start, and after which a checkpoint is damaged first."""

KEPT = ("ray", "torchinductor")  # temporary directories that outlive a run: Ray's logs and sockets, and a cache

RESTART = b"restarting from the newest checkpoint"
RESUME = "checkpointing.resume=true"

Outcome = Literal["went on", "restarted", "stopped", "hung"]


@dataclass
class Row:
    """One fault and what came of it. `wrong` is empty if all is as promised."""

    fault: str
    scenario: str
    moment: str  # "running" or "starting"
    step: int
    did: str
    outcome: Outcome = "hung"
    exit_code: int | None = None
    message: str = ""
    back_s: float | None = None  # until the next step was recorded, a new start included
    wrong: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "", [])}


class Trial:
    """A run of a scenario. `rows` has the faults so far; `conduct` tells its reward and environment what to do."""

    def __init__(self, scenario: Scenario, output: Path, name: str, random: Random, disk: Disk | None) -> None:
        self.scenario, self.output, self.name, self.random = scenario, output, name, random
        self.disk = disk
        self.directory = output / name
        self.rows: list[Row] = []
        self._temporary = Path(tempfile.mkdtemp(prefix="c-"))  # short: Ray's sockets are in it
        self._own = Path(tempfile.mkdtemp(prefix="ray-own-"))
        self.clock = _clock(self._own)
        self.conduct = self._own / "conduct"
        second = self.clock.environment if self.clock else {}
        self.cluster = Cluster(second) if scenario.hosts > 1 else None
        self.run: Run  # since `launch`
        self.in_start = random.random() < STARTING
        self.exact = scenario.exact  # until a fault may change the results

    @property
    def relay(self) -> Relay | None:
        return self.cluster.relay if self.cluster else None

    @property
    def driver(self) -> int:
        return self.run.process.pid

    def pids(self, target: str) -> list[int]:
        """Processes of the run whose command line has that of the target ("": all)."""
        word = self.scenario.reached.get(target, "" if not target else None)
        if word is None:
            return []
        if self.cluster:
            return [pid for pid in self.cluster.pids() if re.search(word, command_line(pid))]
        return self.run.pids(word)

    def stopped(self) -> bool:
        return self.run.process.poll() is not None

    def second(self) -> subprocess.Popen[str]:
        """Starts the same command once more."""
        command = self.run.process.args
        assert isinstance(command, list)
        begin = next(place for place, word in enumerate(command) if str(word).endswith("/dagrl"))
        return subprocess.Popen(command[begin:], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def launch(self, *more: str) -> None:
        usual = self.clock.environment if self.clock else {}
        prefix, extra, environment = ((), (), usual) if self.cluster is None else self.cluster.ready()
        arguments = (*self.scenario.arguments(), *extra, *more)
        self._started = time.time()
        environment = {"TERM": "dumb", "TMPDIR": str(self._temporary), CONDUCT: str(self.conduct), **environment}
        self.run = Run(self.scenario.config, self.output, self.name, *arguments, prefix=prefix, **environment)

    def disturb(self, fault: Fault, *, resume: bool = True) -> Row | None:
        """Applies a fault at a random moment, and waits until the run is back; starts it again if it stopped and `resume`.

        Returns None if the run has ended before.
        """
        moment = "starting" if self.in_start else "running"
        self.in_start = False
        step = self._wait_for(moment)
        if step is None:
            return None
        row = Row(fault.name, self.scenario.name, moment, step, "")
        restarts, shown = self._restarts(), len(self.run.drawn)
        try:
            with fault.applied(self, self.random) as row.did:
                self._sleep(self.random.uniform(*fault.lasts_s))
        except AssertionError as error:
            row.wrong.append(str(error))
        self.rows.append(row)
        self.exact &= not fault.changes
        began = time.time()
        row.outcome = self._await(fault, began, restarts)
        if row.outcome == "hung":
            row.wrong.append(f"no step and no end within {HANG_S:g} s: {self._tail()}")
            self.end()
            self._resume(row)
        elif row.outcome == "stopped":
            self._check_stop(row, fault, shown)
            if row.exit_code != 0 and resume:
                self._resume(row)
        elif fault.harmless and row.outcome != "went on":
            row.wrong.append("a fault that must not be noticed stopped the run")
        if not self.stopped() and not self.in_start:
            row.back_s = round(time.time() - began, 1)
        return row

    def finish(self) -> list[str]:
        """Waits for the end. Returns what is wrong with it."""
        try:
            code = self.run.finish(3 * HANG_S)
        except AssertionError:
            code = None
        wrong = [] if code == 0 else [f"ended with {code}: {self._tail()}"]
        wrong += self._left()
        self.end()
        if self.cluster:
            self.cluster.close()
        shutil.rmtree(self._own)
        return wrong

    def _resume(self, row: Row) -> None:
        """Starts the stopped run again; sometimes with a damaged checkpoint first, which must be refused.

        The next fault comes during this start, or after its first step.
        """
        if row.step and self.random.random() < DAMAGED:
            self._damage()
        self.launch(RESUME)
        self.in_start = self.random.random() < STARTING
        if not self.in_start:
            self._wait_for_step(self._started, HANG_S)

    def _damage(self) -> None:
        """Checks that a checkpoint cut or flipped at a byte is refused with one message, or means the same."""
        with damaged(self.directory / "checkpoints", self.random) as did:
            if did is None:
                return
            row = Row("checkpoint " + did.kind, self.scenario.name, "starting", did.step, did.text)
            self.launch(RESUME)
            ended = self._wait(lambda: self.stopped() or self._steps_since(self._started) > 0, HANG_S)
            self.rows.append(row)
            row.outcome = "stopped" if ended and self.stopped() else "went on" if ended else "hung"
            if row.outcome == "stopped":
                self._check_stop(row, None)
            elif not did.harmless:
                row.wrong.append("the run resumed from a damaged checkpoint")
            self.end()

    def _wait_for(self, moment: str) -> int | None:
        """Waits for a random moment of a kind. Returns the last recorded step; None if the run has ended."""
        if moment == "starting":
            self._sleep(self.random.uniform(0.0, START_S))
        else:
            self._wait_for_step(self._started, HANG_S)
            self._sleep(self.random.uniform(0.0, 2.0))
        self.run.notice()
        return None if self.stopped() else self._step()

    def _await(self, fault: Fault, began: float, restarts: int) -> Outcome:
        """Waits until a fault has had its effect. `restarts` is their number before it."""
        restarted: list[float] = []

        def settled() -> bool:
            if self.stopped():
                return True
            if not restarted and self._restarts() > restarts:
                restarted.append(time.time())
            if restarted:
                return self._steps_since(restarted[0]) > 0
            return self._steps_since(began + fault.patience_s) > 0  # one that was ending may be recorded after the fault

        if not self._wait(settled, HANG_S):
            return "hung"
        if self.stopped():
            return "stopped"
        return "restarted" if restarted else "went on"

    def _restarts(self) -> int:
        return b"".join(self.run._shown).count(RESTART)

    def _check_stop(self, row: Row, fault: Fault | None, since: int = 0) -> None:
        """Checks what a stopped run has left: one message, an exit code, nothing else.

        A restart before the fault may have shown a worker's traceback, in what was drawn up to `since`.
        """
        row.exit_code = self.run.finish(GONE_S)
        shown = self.run.drawn
        row.message = " ".join(shown.partition("dagrl: error:")[2].split())[:300]
        killed = row.exit_code == -signal.SIGKILL
        if row.exit_code not in (0, 1, 2, 130) and not (killed and fault is not None and "driver" in fault.name):
            row.wrong.append(f"exit code {row.exit_code}: {self._tail()}")
        if row.exit_code in (1, 2, 130) and shown.count("dagrl: error:") != 1:
            row.wrong.append(f"{shown.count('dagrl: error:')} messages: {self._tail()}")
        if row.exit_code == 0 and row.step and self._step() < self.scenario.steps:
            row.wrong.append("exit code 0 before the last step")
        if "Traceback" in shown[since:]:
            row.wrong.append(f"a traceback: {shown[since:].partition('Traceback')[2][:1500]}")
        row.wrong += self._left()
        self.end()

    def _left(self) -> list[str]:
        run = self.run
        self._wait(lambda: not (run.left_processes() or run.left_shared_memory()), GONE_S)
        left = [f"process {command_line(process.pid)} ({_doing(process.pid)})" for process in run.left_processes()]
        left += [f"{SHARED_MEMORY}/{name}" for name in run.left_shared_memory()]
        left += [str(path) for path in sorted(self._temporary.iterdir()) if not path.name.startswith(KEPT)]
        return [f"left behind: {', '.join(left)}"] if left else []

    def end(self) -> None:
        with suppress(OSError):
            self.run.end()

    def _step(self) -> int:
        return max((int(line["step"]) for line in self.run.metrics), default=0)

    def _steps_since(self, began: float) -> int:
        until = time.time() + 1.0  # later times are of a clock that was ahead
        return sum("loss" in line and began < float(line["time"]) < until for line in self.run.metrics)

    def _wait_for_step(self, since: float, limit_s: float) -> bool:
        return self._wait(lambda: self.stopped() or self._steps_since(since) > 0, limit_s)

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until:
                return False
            self.run.notice()
            if self.cluster:
                self.cluster.keep()
            time.sleep(0.2)
        return True

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopped():
            time.sleep(0.05)

    def _tail(self) -> str:
        return self.run.drawn[-1500:]


def _doing(pid: int) -> str:
    """State, parent and system call of a process that should have ended."""
    place = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines())
        return f"{status['State']}, parent {status['PPid']}, in {(place / 'wchan').read_text()}"
    except OSError as error:
        return f"gone: {error.strerror}"


def _clock(directory: Path) -> Clock | None:
    try:
        return Clock(directory)
    except (OSError, subprocess.CalledProcessError):
        return None


WEIGHTS = "final_model/model.safetensors"


def differences(scenario: Scenario, truth: Path | None, found: Path) -> list[str]:
    """Returns what differs between the directories of an undisturbed run and of a disturbed one that reached its end.

    `truth` is None for a scenario that is not `exact`.
    """
    ours = untimed(steps_of(found))
    steps, expected = [int(line["step"]) for line in ours], list(range(1, scenario.steps + 1))
    if steps != expected:
        missing, more = sorted(set(expected) - set(steps)), [step for step in set(steps) if steps.count(step) > 1]
        return [f"steps {missing} are missing, {more} are there more than once"]
    if truth is not None:
        return _exact(ours, untimed(steps_of(truth)), truth, found)
    losses = [line["loss"] for line in ours if "loss" in line]
    return [] if all(loss is not None and math.isfinite(loss) for loss in losses) else ["a loss is not finite"]


def _exact(ours: list[Metrics], theirs: list[Metrics], truth: Path, found: Path) -> list[str]:
    wrong = []
    for one, other in zip(ours, theirs, strict=True):
        keys = [key for key in {**one, **other} if key not in OF_REPLAYS and one.get(key) != other.get(key)]
        if keys:
            shown = {key: (one.get(key), other.get(key)) for key in keys[:4]}
            wrong.append(f"step {one['step']}, first metrics that differ (disturbed, undisturbed): {shown}")
            break
    if (found / WEIGHTS).read_bytes() != (truth / WEIGHTS).read_bytes():
        wrong.append("the final weights differ")
    return wrong
