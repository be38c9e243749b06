"""Reading a replay's outcome, and making one `PhaseError` of whatever went wrong: an exception, a death, or a hang."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ray.exceptions import RayActorError, RayChannelError, RayError

from dagrl.errors import PhaseError, WorkerFailure, cause_first
from dagrl.executors.base import Executable
from dagrl.executors.packet import Packet
from dagrl.worker_group import GRACE_S, WorkerGroup, first_line

if TYPE_CHECKING:
    from dagrl.replay import Replay

TURN_S = 0.1
"""How long to wait for one graph before looking at the next, and at what has come of this one."""

REPORT_S = 2.0
"""How long workers may take to report what they are running, after a hang."""


def collect_outcome(replay: Replay, groups: Mapping[str, WorkerGroup]) -> list[list[Packet]]:
    """The packets of every graph of a replay. Raises PhaseError, the cause first."""
    found: dict[int, list[Packet]] = {}
    failures: list[WorkerFailure] = []
    late = False
    broken: RayError | None = None
    deadline = replay.deadline
    waiting = deque(range(len(replay.submitted)))
    while waiting:
        graph = waiting.popleft()
        try:
            found[graph] = _fetch(*replay.submitted[graph], max(0.0, min(deadline - time.monotonic(), TURN_S)))
        except TimeoutError:
            if time.monotonic() < deadline:
                waiting.append(graph)
                failures += [failure for failure in _so_far(*replay.submitted[graph]) if failure not in failures]
            else:
                late = True
        except (RayActorError, RayChannelError) as error:
            broken = error
            died = _deaths(replay, groups, error)
            failures += died
            _release(groups, died)
        else:
            mine = [failure for packet in found[graph] for failure in packet.failures]
            failures += [failure for failure in mine if failure not in failures]
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise PhaseError(cause_first(failures))
    if late:
        raise _hang(replay, groups)
    if broken is not None:
        text = f"phase {replay.phase!r}, replay {replay.number}: its graph broke, though every worker answers: {broken}"
        raise PhaseError((), text, breaks=f"the graph of phase {replay.phase!r} broke")
    return [found[graph] for graph in sorted(found)]


def _so_far(executable: Executable, submitted: object) -> Sequence[WorkerFailure]:
    """Failures of workers whose outputs have come. Others may wait for them in a collective, without end."""
    with suppress(RayChannelError):  # the next `fetch` will say so
        return executable.failures(submitted)
    return ()


def _fetch(executable: Executable, submitted: object, timeout_s: float) -> list[Packet]:
    if isinstance(submitted, RayError):  # it could not even be sent
        raise submitted
    return executable.fetch(submitted, timeout_s)


def _release(groups: Mapping[str, WorkerGroup], died: Sequence[WorkerFailure]) -> None:
    """Free the peers of dead workers from their collectives: over NCCL they would wait for them."""
    for role in {failure.role for failure in died}:
        groups[role].abort({failure.rank for failure in died if failure.role == role})


def _deaths(replay: Replay, groups: Mapping[str, WorkerGroup], error: RayError) -> list[WorkerFailure]:
    actor_id = getattr(error, "actor_id", None) or ""
    for group in groups.values():
        rank = group.rank_of_actor(actor_id)
        if rank is not None:
            return [_failure(replay, group, rank, "died", "", first_line(error), "")]
    return [
        _failure(replay, group, rank, "died", "", "its process ended", "")
        for group in groups.values()
        for rank, (what, _) in group.hang_reports(REPORT_S).items()
        if what == "died"
    ]


def _hang(replay: Replay, groups: Mapping[str, WorkerGroup]) -> PhaseError:
    """An error that names the workers still busy; they are killed, so that their peers are freed from collectives."""
    failures = []
    for group in groups.values():
        reports = group.hang_reports(REPORT_S)
        busy = {rank: report for rank, report in reports.items() if report[0]}
        failures += [
            _failure(replay, group, rank, "hung", what, f"running {what}", stack) for rank, (what, stack) in busy.items()
        ]
        group.kill(list(busy))
    failures.sort(key=lambda failure: "torch/distributed" in failure.traceback)  # waiting for a peer, rather than the cause
    advice = "The deadline is timeouts.replay_s (timeouts.warmup_s in a warm-up); raise it if the phase is only slow."
    if not failures:
        advice = (
            f"phase {replay.phase!r}, replay {replay.number}: no result by its deadline, though no worker is running it; "
            f"the first replay of a graph includes its workers' imports, so warm up first. {advice}"
        )
    return PhaseError(tuple(failures), advice)


def _failure(replay: Replay, group: WorkerGroup, rank: int, kind: str, node: str, message: str, stack: str) -> WorkerFailure:
    known = group.failure(rank, kind, node or "unknown", message, stack)
    return dataclasses.replace(known, phase=replay.phase, replay=replay.number)
