"""Waits for the answers of plain calls to workers, and turns what went wrong into failures that name the worker."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from dagrl import errors
from dagrl.errors import DeadlineError, UserError, WorkerError, WorkerFailure, cause_first, error_text
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.phase import Role

POLL_S = 0.2
"""How often `while_waiting` is called while workers start."""

GRACE_S = 3.0
"""How long to wait for other workers' reports after one failed in a plain call, or broke a graph."""

Failure = Callable[..., WorkerFailure]
"""Makes a failure of the worker of a rank; `WorkerGroup.failure`."""


def gather(
    calls: Sequence[tuple[Failure, str, Sequence[Any]]],
    deadline: Deadline,
    while_waiting: Callable[[], None] | None = None,
) -> list[list[Any]]:
    """Returns the results of calls, one reference for each rank, with their names; None for a rank that was not called.

    `while_waiting` is called repeatedly and may raise to give up. Raises WorkerError with all that failed, as soon as one
    has and the others had time to report; a UserError unchanged, unless a worker died; DeadlineError if late.
    """
    asked = [(ref, (failure, rank, doing)) for failure, doing, refs in calls for rank, ref in enumerate(refs)]
    callers = {ref: caller for ref, caller in asked if ref is not None}
    until = time.monotonic() + deadline.seconds
    waiting = list(callers)
    results: dict[Any, Any] = {}
    failures: list[WorkerFailure] = []
    refusals: list[UserError] = []
    while waiting:
        left = max(0.0, until - time.monotonic())
        ready, waiting = ray.wait(waiting, timeout=min(left, POLL_S) if while_waiting else left)
        if while_waiting:
            while_waiting()
        for ref in ready:
            try:
                result = _result(ref, *callers[ref])
            except UserError as error:
                refusals.append(error)
                until = min(until, time.monotonic() + GRACE_S)
                continue
            if isinstance(result, WorkerFailure):
                failures.append(result)
                until = min(until, time.monotonic() + GRACE_S)
            else:
                results[ref] = result
        if not ready and time.monotonic() >= until:
            break
    if refusals and not any(failure.kind == "died" for failure in failures):  # a death may be why others refused
        raise refusals[0]
    if failures:
        raise WorkerError(cause_first(failures))
    if waiting:
        late = [callers[ref] for ref in waiting]
        names = [failure(rank, "hung", doing, deadline.missed).describe() for failure, rank, doing in late]
        raise DeadlineError("\n".join(names) + f"; raise {deadline.key} if it is slow")
    return [[None if ref is None else results[ref] for ref in refs] for _, _, refs in calls]


def _result(ref: Any, failure: Failure, rank: int, doing: str) -> Any:
    """Returns the worker's result, or its failure. Raises UserErrors unchanged."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as failed:
        if isinstance(failed.cause, UserError):
            raise failed.cause from None
        return failure(rank, "raised", doing, error_text(failed.cause), str(failed))
    except ray.exceptions.RayActorError as died:
        if died.actor_init_failed:
            return failure(rank, "raised", doing, *_raised_in_constructor(died))
        return failure(rank, "died", doing, first_line(died))
    except ray.exceptions.RayError as unread:  # its result or error cannot be unpickled here
        return failure(rank, "raised", doing, f"its result cannot be read: {first_line(unread)}", str(unread))


def _raised_in_constructor(died: ray.exceptions.RayActorError) -> tuple[str, str]:
    """Returns what a worker's constructor raised, and its traceback. Raises UserErrors unchanged.

    For an error while an actor is created, Ray keeps only coloured text.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", str(died)).strip()
    raised = re.split(r'^  File ".*\n(?:    .*\n)*', text, flags=re.MULTILINE)[-1]  # the text after the last frame
    name, _, message = raised.partition(": ")
    kind = getattr(errors, name.removeprefix(f"{errors.__name__}."), None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        raise kind(message)
    return raised, text


def first_line(error: Exception) -> str:
    """The first line of an error of Ray's, without Ray's advice."""
    return str(error).strip().splitlines()[0]


def end_workers(workers: Sequence[tuple[Role, Sequence[ActorHandle]]], timeout_s: float) -> None:
    """Calls `shutdown()` of all these workers within the deadline, and then kills their processes."""
    refs = [actor.shutdown.remote() for role, actors in workers if "shutdown" in role.methods for actor in actors]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    for _, actors in workers:
        for actor in actors:
            ray.kill(actor)
