"""Reading a replay's outcome, and making one `PhaseError` of whatever went wrong: an exception, a death, or a hang."""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray.exceptions import RayActorError, RayChannelError, RayError

from dagrl.errors import DeadlineError, PhaseError, WorkerFailure, cause_first, error_text
from dagrl.executors.base import Executable
from dagrl.executors.node import DIED, NO_ANSWER, Report
from dagrl.executors.packet import Packet
from dagrl.executors.pickling import UnreadableError
from dagrl.worker_group import GRACE_S, WorkerGroup, first_line

if TYPE_CHECKING:
    from dagrl.replay import Replay

TURN_S = 0.1
"""How long to wait for one graph before looking at the next, and at what has come of this one."""

REPORT_S = 2.0
"""How long workers may take to report what they are running, after a hang."""

RELEASE_S = 3.0
"""How long workers may take to come out of their collectives, once these are broken, before they are killed."""

Groups = Mapping[str, WorkerGroup]
Place = tuple[str, int]
"""A worker by role and rank."""


@dataclass(slots=True)
class SoFar:
    """What is known of a replay: of each of its graphs the packets, failures of its workers, what broke a graph."""

    waiting: deque[int]  # graphs
    deadline: float
    grace_s: float  # what others have to end the replay after one raised
    found: dict[int, list[Packet]] = field(default_factory=dict)
    failures: list[WorkerFailure] = field(default_factory=list)
    broken: Exception | None = None
    late: bool = False

    def add(self, failures: Sequence[WorkerFailure]) -> None:
        """Take up failures; the first one brings the deadline nearer, and what breaks a graph does once more.

        While no graph is broken the others may have work to end, after which all graphs are whole. Else nothing can be
        saved, and they have a moment to say what they know.
        """
        self.failures += [failure for failure in failures if failure not in self.failures]
        if self.failures or self.broken:
            left = GRACE_S if self.broken else self.grace_s
            self.deadline = min(self.deadline, time.monotonic() + left)


def collect_outcome(replay: Replay, groups: Groups, until: float = math.inf) -> list[list[Packet]]:
    """The packets of every graph of a replay; `groups` are those that its phase is on.

    Raises PhaseError, the cause first; DeadlineError when the outcome is not there by `until` (`time.monotonic`), though
    it may still come: ask again.
    """
    so_far = replay.so_far
    while so_far.waiting:
        _wait_for_next(replay, so_far, groups, until)
    if so_far.late:
        raise _late(replay, so_far, groups) from so_far.broken
    if so_far.broken is not None:
        raise _broke(replay, so_far.failures, so_far.broken) from so_far.broken
    if so_far.failures:
        raise PhaseError(cause_first(so_far.failures))
    return [so_far.found[graph] for graph in range(len(so_far.found))]


def _wait_for_next(replay: Replay, so_far: SoFar, groups: Groups, until: float) -> None:
    """Wait for one graph, a moment at most, if others are to be looked at too."""
    graph = so_far.waiting[0]
    executable, submitted = replay.submitted[graph]
    try:
        left = min(so_far.deadline, until) - time.monotonic()
        packets = so_far.found[graph] = _fetch(executable, submitted, max(0.0, min(left, TURN_S)))
    except TimeoutError:
        now = time.monotonic()
        late = now >= so_far.deadline
        so_far.add(_come(executable, submitted))  # who failed is to blame, and not who waits for it
        if late:
            so_far.late = True
            so_far.waiting.popleft()
            return
        so_far.waiting.rotate(-1)
        if now >= until:
            raise DeadlineError(
                f"phase {replay.phase!r}, replay {replay.number}: no result yet; its own deadline is in "
                f"{so_far.deadline - now:.1f} s. Ask again, or wait longer"
            ) from None
    except UnreadableError as error:  # of one result; the others are dropped, and the graph is whole
        so_far.waiting.popleft()
        so_far.add([_of_result(replay, groups, error)])
    except Exception as error:  # whatever a graph fails with, the replay has failed, and no worker may be left waiting
        if isinstance(error.__cause__, KeyboardInterrupt):  # it came while Ray raised: Python makes a SystemError of both
            raise error.__cause__ from None
        so_far.broken = error
        so_far.waiting.popleft()
        died = _deaths(replay, groups, error)
        so_far.add(died)
        for role in {failure.role for failure in died}:  # over NCCL, peers would wait for the dead
            dead = {failure.rank for failure in died if failure.role == role}
            groups[role].abort([rank for rank in range(groups[role].layout.world_size) if rank not in dead])
    else:
        so_far.waiting.popleft()
        for packet in packets:
            if packet.failures:
                so_far.add(packet.failures)


def _fetch(executable: Executable, submitted: object, timeout_s: float) -> list[Packet]:
    if isinstance(submitted, RayError):  # it could not even be sent
        raise submitted
    return executable.fetch(submitted, timeout_s)


def _come(executable: Executable, submitted: object) -> Sequence[WorkerFailure]:
    """Failures of workers whose outputs have come. Others may wait for them in a collective, without end."""
    with suppress(RayChannelError):  # the next `fetch` will say so
        return executable.failures(submitted)
    return ()


def _deaths(replay: Replay, groups: Groups, error: Exception) -> list[WorkerFailure]:
    if not isinstance(error, RayActorError | RayChannelError):
        return []
    actor_id = getattr(error, "actor_id", None) or ""
    for group in groups.values():
        rank = group.rank_of_actor(actor_id)
        if rank is not None:
            return [_failure(replay, group, rank, "died", "", first_line(error), "")]
    return [
        _failure(replay, group, rank, "died", "", "its process ended", "")
        for group in groups.values()
        for rank, found in group.reports(REPORT_S).items()
        if found is DIED
    ]


def _of_result(replay: Replay, groups: Groups, error: UnreadableError) -> WorkerFailure:
    """The failure of a worker whose result this process cannot read."""
    actor_id, node = error.writer
    ranks = {role: group.rank_of_actor(actor_id) for role, group in groups.items()}
    role, rank = next((role, rank) for role, rank in ranks.items() if rank is not None)
    text = f"its result cannot be read by the driver: {error}"
    return _failure(replay, groups[role], rank, "raised", node, text, "".join(traceback.format_exception(error)))


def _broke(replay: Replay, failures: Sequence[WorkerFailure], error: Exception) -> PhaseError:
    breaks = f"the graph of phase {replay.phase!r} broke"
    if failures:
        return PhaseError(cause_first(failures), breaks=breaks)
    text = f"phase {replay.phase!r}, replay {replay.number}: its graph broke, though no worker died: "
    return PhaseError((), f"{text}{error_text(error)}", breaks=breaks)


def _late(replay: Replay, so_far: SoFar, groups: Groups) -> PhaseError:
    """The error of a replay that passed its deadline, or the time that its first failure left: it names who is to blame.

    Workers that run it are freed from their collectives. Whoever stays in it all the same hangs, and is killed; not where
    another one failed, or a graph broke, as that was no deadline of theirs. Workers that run another phase are left alone:
    this one may have waited for its turn behind it.
    """
    breaks = f"replay {replay.number} of phase {replay.phase!r} did not end in time"
    if so_far.failures and not so_far.broken:
        breaks += (
            f", which is timeouts.grace_s = {so_far.grace_s:g} s after a worker raised, or its deadline if that is sooner"
        )
    running = {place: found for place, found in _reports(groups, REPORT_S).items() if _runs(found, replay)}
    for role, group in groups.items():
        group.abort([rank for of, rank in running if of == role])
    if so_far.failures:
        return PhaseError(cause_first(so_far.failures), breaks=breaks)
    if so_far.broken is not None:
        return _broke(replay, (), so_far.broken)
    hung = _stuck(replay, groups, running) or list(running)
    failures = [_hung(replay, groups, place, running[place]) for place in hung]
    advice = "The deadline is timeouts.replay_s (timeouts.warmup_s in a warm-up); raise it if the phase is only slow."
    if not failures:
        advice = (
            f"phase {replay.phase!r}, replay {replay.number}: no result by its deadline, though no worker is running it"
            f"{_others(groups)}; the first replay of a graph includes its workers' imports, so warm up first. {advice}"
        )
    return PhaseError(tuple(failures), advice, breaks)


def _stuck(replay: Replay, groups: Groups, running: Mapping[Place, Report]) -> list[Place]:
    """Those of the workers that do not come out of a replay though their collectives are broken; they are killed."""
    stuck, left = list(running), RELEASE_S
    until = time.monotonic() + left
    while stuck and left > 0:  # whoever is killed was looked at: the time may pass while this process gets no turn
        time.sleep(min(left, TURN_S))
        left = until - time.monotonic()
        reports = _reports(groups, max(TURN_S, left))
        stuck = [place for place in stuck if _runs(reports[place], replay)]
    for role, group in groups.items():
        group.kill([rank for of, rank in stuck if of == role])
    return stuck


def _reports(groups: Groups, timeout_s: float) -> dict[Place, Report]:
    until = time.monotonic() + timeout_s
    return {
        (role, rank): found
        for role, group in groups.items()
        for rank, found in group.reports(max(0.0, until - time.monotonic())).items()
    }


def _runs(found: Report, replay: Replay) -> bool:
    """Whether a worker runs this replay. One that does not answer may: it holds the interpreter, or died."""
    return found in (NO_ANSWER, DIED) or (found.phase, found.replay) == (replay.phase, replay.number)


def _hung(replay: Replay, groups: Groups, place: Place, found: Report) -> WorkerFailure:
    role, rank = place
    if found is DIED:
        return _failure(replay, groups[role], rank, "died", "", "its process ended", "")
    left = "" if groups[role].owned else "; it was made by somebody else, and is left as it is"
    return _failure(replay, groups[role], rank, "hung", found.what, f"running {found.what}{left}", found.stack)


def _others(groups: Groups) -> str:
    """What the workers run instead."""
    busy = sorted({f"{found.phase!r}" for found in _reports(groups, REPORT_S).values() if found.phase})
    return f" (they are running {', '.join(busy)}, which comes before it)" if busy else ""


def _failure(replay: Replay, group: WorkerGroup, rank: int, kind: str, node: str, message: str, stack: str) -> WorkerFailure:
    known = group.failure(rank, kind, node or "unknown", message, stack)
    return dataclasses.replace(known, phase=replay.phase, replay=replay.number)
