"""The methods of somebody else's worker group as phases: one graph per method and host.

A call gives each worker its own arguments, or leaves it out. The fleet's own code decides who gets what. Only the transport
is ours: one message for all workers of a host in place of one Ray call for each, and results through one mailbox.

Calls of phases and other calls of the group keep the order in which they are made, as they would in the actors' queues: a
replay starts when earlier plain calls have ended, and a plain call is sent when earlier replays have ended.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray

from dagrl.errors import DeadlineError, GraphError, PhaseError
from dagrl.runtime.edges.pickling import Encoded, Shares
from dagrl.runtime.graph import Arguments
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Phase, Shard, Value, join
from dagrl.runtime.replay import Replay
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.split import Codec
from dagrl.runtime.worker_group import WorkerGroup

Call = Arguments | None  # what one worker is called with; None: it is left out

Result = TypeVar("Result")


def _split(calls: Sequence[Call], shards: int) -> list[Shares]:
    each = len(calls) // shards
    distinct = {key: Encoded.of(call) for key, call in {id(call): call for call in calls}.items()}
    parts = [distinct[id(call)] for call in calls]
    return [Shares(tuple(parts[start : start + each])) for start in range(0, len(calls), each)]


PER_WORKER = Codec(_split, lambda results: [result for of_shard in results for result in of_shard])
"""The input is a list with the `Call` of each worker, the result a list of theirs. Equal calls may be one object."""


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
            if self._plain:
                _, late = ray.wait(self._plain, num_returns=len(self._plain), timeout=self._deadline_s, fetch_local=False)
                if late:
                    raise DeadlineError(
                        f"{len(late)} plain calls before a replay have not ended within deadline_s = {self._deadline_s:g} "
                        "s; raise it if they are slow"
                    )
                self._plain = []
            self._replays = [replay for replay in self._replays if not replay.done]
            replay = start()
            self._replays.append(replay)
        return replay

    def plain(self, send: Callable[[], Result]) -> Result:
        """Sends plain calls once earlier replays have ended; later replays wait for the object references that `send`
        returns: one, a list, or the `futures` of an object, such as NeMo-RL's `MultiWorkerFuture`."""
        with self._lock:
            for replay in self._replays:
                with suppress(PhaseError):  # for its caller
                    replay.result()
            self._replays = []
            sent = send()
            returned = getattr(sent, "futures", sent)
            references = returned if isinstance(returned, list) else [returned]
            self._plain += [reference for reference in references if isinstance(reference, ray.ObjectRef)]
        return sent


class Fleet:
    """The phases of one worker group, and the order of its calls. `close` ends the graphs; the actors live on."""

    def __init__(
        self,
        actors: Sequence[Any],
        methods: Sequence[str],
        *,
        role: str,
        deadline_s: float,
        max_bytes: int,
        prepare: Callable[[object], object] | None = None,
    ) -> None:
        """`deadline_s`: the longest that one call may take. `max_bytes`: the most that one worker takes or returns in a
        call; memory is taken as it is used. `prepare(worker)` runs on each worker before its first call.

        Raises GraphError for a method that the actors lack, WorkerError for an actor that died.
        """
        if not methods:
            raise GraphError("phases is empty; name the methods to run as phases, such as phases=('train', 'get_logprobs')")
        self.limits = deadline_s, max_bytes
        self.closed = False
        self.order = CallOrder(deadline_s)
        apart = WorkerGroup.from_actors(actors, ParallelLayout(dp=len(actors)), role, call_timeout_s=deadline_s)
        each = together([location.node for location in apart.locations])
        layout = ParallelLayout(dp=len(actors) // each, tp=each)
        group = WorkerGroup.from_actors(actors, layout, role, call_timeout_s=deadline_s)
        if prepare is not None:
            group.call_function(prepare)
        options = SchedulerOptions(fallback="error", replay_s=deadline_s)
        self._scheduler = Scheduler([group], options)
        self._phases = {method: _phase_of(role, method) for method in dict.fromkeys(methods)}
        for phase in self._phases.values():
            self._scheduler.add(
                phase,
                codec=PER_WORKER,
                warmup_value=[None] * len(actors),
                input_bytes=max_bytes * each,
                result_bytes=max_bytes,
                room_key="max_bytes of accelerate()",
            )
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
        self.closed = True
        self._scheduler.close()


def together(nodes: Sequence[str]) -> int:
    """Returns the most workers that one graph can have, if each has equally many, in order, on one of `nodes`."""
    sizes = [size for size in range(1, len(nodes) + 1) if len(nodes) % size == 0]
    return max(
        size for size in sizes if all(len(set(nodes[start : start + size])) == 1 for start in range(0, len(nodes), size))
    )


def _phase_of(role: str, method: str) -> Phase:
    def call(**inputs: Any) -> Value:
        shard: Shard = inputs[role]
        return join(shard.spread(method, inputs["arguments"]))

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (role, "arguments")]
    setattr(call, "__signature__", inspect.Signature(parameters))  # noqa: B010  # functions have it, mypy does not know
    return Phase(method, call, None, (role,))
