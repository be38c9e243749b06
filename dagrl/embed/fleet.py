"""The methods of somebody else's worker group as phases: one graph per method over all of its actors.

A call gives each worker its own arguments, or leaves it out. The fleet's own code decides who gets what. Only the transport
is ours: one message for all workers of a host in place of one Ray call for each, and results through one mailbox.

Calls of phases and other calls of the group keep the order in which they are made, as they would in the actors' queues: a
replay starts when earlier plain calls have ended, and a plain call is sent when earlier replays have ended.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError
from ray.experimental.compiled_dag_ref import CompiledDAGRef

from dagrl.errors import DeadlineError, GraphError, PhaseError
from dagrl.runtime.arguments import Arguments
from dagrl.runtime.codec import Codec
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Phase, Shard, Value
from dagrl.runtime.replay import Replay
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.worker_group import WorkerGroup

Call = Arguments | None
"""What one worker is called with; None: it is left out."""

Result = TypeVar("Result")


def _as_given(calls: Sequence[Call], workers: int) -> Sequence[Call]:
    return calls


PER_WORKER = Codec(_as_given, list)
"""The input is a list with the `Call` of each worker, the result a list of theirs."""


class ReplayRef(CompiledDAGRef):  # type: ignore[misc]  # Ray has no types
    """A reference to the result of one worker, for `ray.get`, which asks references of this kind for their value.

    `ray.wait` does not take it, and it cannot be passed to another call.
    """

    def __init__(self, worker: int) -> None:
        self.replay: Replay | None = None  # set when the call is sent
        self._worker = worker

    def get(self, timeout: float | None = None) -> Any:
        """Returns the worker's result. Raises PhaseError; GetTimeoutError after `timeout` seconds."""
        assert self.replay is not None, "the call was not sent"
        try:
            return self.replay.result(timeout)[self._worker]
        except DeadlineError as late:
            raise GetTimeoutError(str(late)) from late

    def __str__(self) -> str:
        return f"ReplayRef(worker {self._worker})"

    def __del__(self) -> None:
        """Nothing to release: results are read in the order of the replays."""


class CallOrder:
    """Keeps replays and plain calls of one fleet in the order in which they are made, from any thread."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: the longest that a replay waits for earlier plain calls."""
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._replays: list[Replay] = []  # that may not have ended
        self._plain: list[Any] = []  # references of plain calls that may not have ended

    def replay(self, start: Callable[[], Replay]) -> Replay:
        """Starts a replay once earlier plain calls have ended. Raises DeadlineError if they do not."""
        with self._lock:
            self._wait_for_plain_calls()
            self._replays = [replay for replay in self._replays if not replay.done]
            replay = start()
            self._replays.append(replay)
        return replay

    def plain(self, send: Callable[[], Result], references: Callable[[Result], Sequence[Any]]) -> Result:
        """Sends plain calls once earlier replays have ended; later replays wait for the calls' `references`."""
        with self._lock:
            for replay in self._replays:
                with suppress(PhaseError):  # for its caller
                    replay.result()
            self._replays = []
            sent = send()
            self._plain += [one for one in references(sent) if isinstance(one, ray.ObjectRef)]
        return sent

    def _wait_for_plain_calls(self) -> None:
        if not self._plain:
            return
        _, late = ray.wait(self._plain, num_returns=len(self._plain), timeout=self._deadline_s, fetch_local=False)
        if late:
            raise DeadlineError(
                f"{len(late)} plain calls before a replay have not ended within deadline_s = {self._deadline_s:g} s; "
                "raise it if they are slow"
            )
        self._plain = []


class Fleet:
    """The phases of one worker group, and the order of its calls. `close` ends the graphs; the actors live on."""

    def __init__(
        self, actors: Sequence[Any], methods: Sequence[str], *, role: str, max_bytes: int, options: SchedulerOptions
    ) -> None:
        """`max_bytes`: the most that one worker takes or returns in a call; memory is taken as it is used.

        Raises GraphError for a method that the actors lack, WorkerError for an actor that died.
        """
        if not methods:
            raise GraphError("phases is empty; name the methods to run as phases, such as phases=('train', 'get_logprobs')")
        self.order = CallOrder(options.replay_s)
        group = WorkerGroup.from_actors(actors, ParallelLayout(dp=len(actors)), role, call_timeout_s=options.replay_s)
        self._scheduler = Scheduler([group], options)
        self._phases = {method: _phase_of(role, method) for method in dict.fromkeys(methods)}
        for one in self._phases.values():
            nobody = [None] * len(actors)
            self._scheduler.add(one, codec=PER_WORKER, warmup_value=nobody, input_bytes=max_bytes, result_bytes=max_bytes)
        try:
            self._scheduler.compile()
            self._scheduler.warmup()  # calls nobody: the fleet's methods know nothing of warm-ups
        except BaseException:
            self.close()
            raise

    def __contains__(self, method: str) -> bool:
        return method in self._phases

    def call(self, method: str, calls: Sequence[Call]) -> Replay:
        """Starts a call of `method`. Its replay gives a list of the workers' results, None for those left out."""
        return self.order.replay(lambda: self._scheduler.replay(self._phases[method], calls))

    def close(self) -> None:
        """Ends the graphs."""
        self._scheduler.close()


def _phase_of(role: str, method: str) -> Phase:
    def call(**given: Any) -> Value:
        shard: Shard = given[role]
        return shard.spread(method, given["arguments"])

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (role, "arguments")]
    setattr(call, "__signature__", inspect.Signature(parameters))  # noqa: B010  # functions have it, mypy does not know
    return Phase(method, call, None, (role,))
