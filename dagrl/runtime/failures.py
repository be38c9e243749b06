"""Reads the outcome of a replay, and turns exceptions, deaths and hangs into one `PhaseError`."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayChannelError

from dagrl.errors import DeadlineError, PhaseError, WorkerFailure, cause_first, error_text
from dagrl.runtime.compile import Compiled
from dagrl.runtime.edges.memory import EdgeClosedError
from dagrl.runtime.edges.packet import Packet
from dagrl.runtime.edges.pickling import UnreadableError
from dagrl.runtime.executors.node import DIED, IDLE, NO_ANSWER, Report
from dagrl.runtime.worker_group import GRACE_S, Groups, first_line

TURN_S = 0.1  # longest wait for one graph before the next one is looked at
REPORT_S = 2.0  # deadline for workers to report what they run, after a hang
DEATH_S = 10.0  # deadline for Ray to learn of a process that has ended, on a busy machine
RELEASE_S = 3.0  # deadline for workers to leave aborted collectives, before they are killed
QUESTION_S = 1.0  # deadline for a worker to answer before it is asked again
RoleRank = tuple[str, int]  # a worker, by its role and rank


@dataclass(slots=True)
class HangWatch:
    """Decides whether a replay hangs: a worker has run it, or has not answered, for `limit_s` while it was waited for.

    A replay that waits for its turn does not hang. Time does not count in which this process did not run, or a worker that
    runs the replay waited for a processor: others may wait for that worker.
    """

    limit_s: float
    waited_s: float = 0.0
    asked_s: float = 0.0  # when the workers were last asked, by `waited_s`
    since_s: dict[RoleRank, float] = field(default_factory=dict)  # when each worker that runs it was first found to
    starved_s: dict[RoleRank, float] = field(default_factory=dict)  # by then
    _last: float = field(default_factory=lambda: time.monotonic())

    def due(self) -> bool:
        """Counts the time since the last call. Returns whether the workers should be asked."""
        now = time.monotonic()
        self.waited_s += min(now - self._last, QUESTION_S)
        self._last = now
        return self.waited_s >= self.asked_s + self.limit_s / 2

    def hung(self, running: Mapping[RoleRank, Report]) -> set[RoleRank]:
        """Returns those of the workers that run the replay which have run it for too long."""
        starved = {worker: report.starved_s for worker, report in running.items()}
        starved_s = max((starved[worker] - self.starved_s.get(worker, starved[worker]) for worker in starved), default=0.0)
        self.waited_s = max(self.asked_s, self.waited_s - starved_s)
        self.asked_s, self.starved_s = self.waited_s, starved
        self.since_s = {worker: self.since_s.get(worker, self.waited_s) for worker in running}
        return {worker for worker, since in self.since_s.items() if self.waited_s - since >= self.limit_s}


@dataclass(slots=True)
class PendingReplay:
    """A replay that was sent to its graphs, and what has come back so far."""

    phase: str
    number: int
    submitted: Sequence[tuple[Compiled, Any]]  # each graph, and what its `submit` returned
    groups: Groups  # of the phase
    deadline: float  # `time.monotonic`
    grace_s: float  # time that other workers get to finish after one raised
    section: str  # what has the deadlines' names, for errors
    hang_s: float = math.inf
    waiting: deque[int] = field(init=False)  # graphs without an outcome
    packets: dict[int, Packet] = field(default_factory=dict)  # by graph
    failures: list[WorkerFailure] = field(default_factory=list)
    broken: Exception | None = None
    late: bool = False
    watch: HangWatch = field(init=False)
    hung: Mapping[RoleRank, Report] = field(default_factory=dict)  # the workers in a replay that hangs

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.submitted)))
        self.watch = HangWatch(self.hang_s)

    @property
    def name(self) -> str:
        return f"phase {self.phase!r}, replay {self.number}"

    def failure(self, role: str, rank: int, kind: str, message: str, node: str = "", stack: str = "") -> WorkerFailure:
        known = self.groups[role].failure(rank, kind, node, message, stack)
        return dataclasses.replace(known, phase=self.phase, replay=self.number)

    def add(self, failures: Sequence[WorkerFailure]) -> None:
        """Adds failures. The first one, and a broken graph, bring the deadline nearer.

        While all graphs are whole, other workers may finish their work, so that the graphs stay whole. Once a graph is
        broken the replay is lost, and workers only get a moment to report.
        """
        self.failures += [failure for failure in failures if failure not in self.failures]
        if self.failures or self.broken:
            left = GRACE_S if self.broken else self.grace_s
            self.deadline = min(self.deadline, time.monotonic() + left)


def collect_outcome(replay: PendingReplay, until: float = math.inf) -> list[Packet]:
    """Returns the packet of every graph of a replay.

    Raises PhaseError, the cause first; DeadlineError if the outcome is not there by `until` (`time.monotonic`). It may still
    come then, and can be asked for again.
    """
    while replay.waiting:
        _wait_for_next(replay, until)
    if replay.late:
        raise _late_error(replay) from replay.broken
    if replay.broken is not None:
        raise _broken_error(replay, replay.broken) from replay.broken
    if replay.failures:
        raise PhaseError(cause_first(replay.failures))
    return [replay.packets[graph] for graph in range(len(replay.packets))]


def _wait_for_next(replay: PendingReplay, until: float) -> None:
    """Waits for one graph, at most `TURN_S`, so that the others are looked at too."""
    number = replay.waiting[0]
    graph, submitted = replay.submitted[number]
    try:
        left = min(replay.deadline, until) - time.monotonic()
        packet = replay.packets[number] = graph.fetch(submitted, max(0.0, min(left, TURN_S)))
    except TimeoutError:
        if replay.watch.due() and not replay.failures and replay.broken is None:
            replay.hung = _workers_that_hang(replay)
        now = time.monotonic()
        late = now >= replay.deadline or bool(replay.hung)
        with suppress(RayChannelError, EdgeClosedError, UnreadableError):  # the next `fetch` raises it
            # Of workers whose outputs came: they are the cause, and others may wait for them in a collective forever.
            replay.add(graph.executable.failures(submitted))
        if late:
            replay.late = True
            replay.waiting.popleft()
            return
        replay.waiting.rotate(-1)
        if now >= until:
            raise DeadlineError(
                f"{replay.name}: no result yet; its deadline is in {replay.deadline - now:.1f} s. Ask again, or wait longer"
            ) from None
    except Exception as error:  # whatever a graph fails with, the replay has failed and its workers must be released
        if isinstance(error.__cause__, KeyboardInterrupt):  # raised while Ray raised: Python turns both into a SystemError
            raise error.__cause__ from None
        replay.broken = error
        replay.waiting.popleft()
        died = _deaths(replay, error)
        replay.add(died)
        for role in {failure.role for failure in died}:  # over NCCL, peers would wait for the dead worker forever
            dead = {failure.rank for failure in died if failure.role == role}
            replay.groups[role].abort([rank for rank in range(replay.groups[role].layout.world_size) if rank not in dead])
    else:
        replay.waiting.popleft()
        if packet.failures:
            replay.add(packet.failures)


def _workers_that_hang(replay: PendingReplay) -> dict[RoleRank, Report]:
    """Returns the workers that run a replay or do not answer, if one of them hangs; none if none does."""
    reports = _reports(replay.groups, QUESTION_S)
    asked_s = QUESTION_S
    while (silent := _silent(replay, reports)) and asked_s < replay.hang_s / 2:
        answers = _reports(replay.groups, QUESTION_S)
        reports |= {worker: answers.get(worker, IDLE) for worker in silent}
        asked_s += QUESTION_S
    running = {worker: report for worker, report in reports.items() if _is_in(report, replay)}
    hung = replay.watch.hung(running)
    return {**running, **{worker: NO_ANSWER for worker in silent}} if hung or silent else {}


def _silent(replay: PendingReplay, reports: Mapping[RoleRank, Report]) -> list[RoleRank]:
    """Returns the workers that do not answer although nothing that they run keeps them from it."""
    silent = [worker for worker, report in reports.items() if report is NO_ANSWER]
    return [(role, rank) for role, rank in silent if replay.groups[role].answers_while_busy]


def _deaths(replay: PendingReplay, error: Exception) -> list[WorkerFailure]:
    if not isinstance(error, RayActorError | RayChannelError | EdgeClosedError):
        return []
    actor_id = getattr(error, "actor_id", None) or ""
    for role, group in replay.groups.items():
        rank = group.rank_of_actor(actor_id)
        if rank is not None:
            return [replay.failure(role, rank, "died", first_line(error))]
    for timeout_s in (REPORT_S, DEATH_S):
        ended = [worker for worker, report in _reports(replay.groups, timeout_s).items() if report is DIED]
        if ended:
            break
    return [replay.failure(role, rank, "died", "its process ended") for role, rank in ended]


def _broken_error(replay: PendingReplay, error: Exception) -> PhaseError:
    breaks = f"the graph of phase {replay.phase!r} broke"
    if replay.failures:
        return PhaseError(cause_first(replay.failures), breaks=breaks)
    return PhaseError((), f"{replay.name}: its graph broke, although no worker died: {error_text(error)}", breaks=breaks)


def _late_error(replay: PendingReplay) -> PhaseError:
    """Returns the error of a replay that passed its deadline, or the grace time after its first failure. It names the cause.

    Workers that run the replay are released from their collectives. Those that stay in it are hung and are killed, unless
    another worker failed or a graph broke, because then they missed no deadline of their own. Workers that run another phase
    are left alone: this replay may have waited for its turn behind it.
    """
    breaks = f"replay {replay.number} of phase {replay.phase!r} did not end in time"
    if replay.failures and not replay.broken:
        grace = f"{replay.section}.grace_s = {replay.grace_s:g} s"
        breaks += f", which is {grace} after a worker raised, or its deadline if that is sooner"
    running = replay.hung or {
        worker: report for worker, report in _reports(replay.groups, REPORT_S).items() if _runs(report, replay)
    }
    for role, group in replay.groups.items():
        group.abort([rank for of, rank in running if of == role])
    if replay.failures:
        return PhaseError(cause_first(replay.failures), breaks=breaks)
    if replay.broken is not None:
        return _broken_error(replay, replay.broken)
    hung = _kill_stuck(replay, running) or list(running)
    failures = [_hung(replay, worker, running[worker]) for worker in hung]
    section = replay.section
    advice = f"The deadline is {section}.replay_s ({section}.warmup_s in a warm-up); raise it if the phase is slow."
    if replay.hung:
        advice = (
            f"It was under way for {replay.watch.waited_s:.0f} s, and counts as hung after {replay.hang_s:.0f} s, by "
            f"{section}.hang_factor and hang_floor_s and the longest replay of the phase so far."
        )
    elif not failures:
        advice = (
            f"{replay.name}: no result by its deadline, although no worker runs it{_others(replay.groups)}; "
            f"the first replay of a graph includes its workers' imports, so warm up first. {advice}"
        )
    return PhaseError(tuple(failures), advice, breaks)


def _kill_stuck(replay: PendingReplay, running: Mapping[RoleRank, Report]) -> list[RoleRank]:
    """Kills and returns the workers that do not leave a replay although their collectives were aborted."""
    stuck = list(running)
    left = 0.0 if all(report is NO_ANSWER for report in running.values()) and replay.hung else RELEASE_S
    until = time.monotonic() + left
    while stuck and left > 0:  # look at least once: this process may be descheduled for longer than that
        time.sleep(min(left, TURN_S))
        left = until - time.monotonic()
        reports = _reports(replay.groups, max(TURN_S, left))
        stuck = [worker for worker in stuck if _runs(reports.get(worker, IDLE), replay)]
    for role, group in replay.groups.items():
        group.kill([rank for of, rank in stuck if of == role])
    return stuck


def _reports(groups: Groups, timeout_s: float) -> dict[RoleRank, Report]:
    """Returns what each worker runs. An actor in several of the groups is listed once, in the role that it runs."""
    until = time.monotonic() + timeout_s
    listed: dict[RoleRank, Report] = {}
    silent: set[object] = set()  # actors that cannot tell their role
    for role, group in groups.items():
        for rank, report in group.reports(max(0.0, until - time.monotonic())).items():
            actor = group.actors[rank]._actor_id
            if actor in silent or (report.role != role and report.role in groups):
                continue
            listed[role, rank] = report
            if report in (NO_ANSWER, DIED):
                silent.add(actor)
    return listed


def _runs(report: Report, replay: PendingReplay) -> bool:
    """Returns whether a worker runs this replay. One that does not answer may: it holds the interpreter, or died."""
    return report in (NO_ANSWER, DIED) or _is_in(report, replay)


def _is_in(report: Report, replay: PendingReplay) -> bool:
    return (report.phase, report.replay) == (replay.phase, replay.number)


def _hung(replay: PendingReplay, worker: RoleRank, report: Report) -> WorkerFailure:
    role, rank = worker
    if report is DIED:
        return replay.failure(role, rank, "died", "its process ended")
    node, since = (report.what, f"running for {report.running_s:.1f} s") if report.phase else ("", report.what)
    left = "" if replay.groups[role].owned else "; dagrl did not create it and leaves it running"
    return replay.failure(role, rank, "hung", since + left, node, report.stack)


def _others(groups: Groups) -> str:
    """Returns what the workers run instead."""
    busy = sorted({f"{report.phase!r}" for report in _reports(groups, REPORT_S).values() if report.phase})
    return f" (they run {', '.join(busy)}, which comes before it)" if busy else ""
