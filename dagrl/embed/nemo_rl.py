"""NeMo-RL: methods of a `RayWorkerGroup` as replays.

    policy.worker_group = accelerate(policy.worker_group, phases=("train", "get_logprobs"))

Everything else of the trainer stays as it is. NeMo-RL's own `run_all_workers_*` methods decide which worker is called with
what (named axes, replication, dummy calls); instead of sending one Ray call per worker, they fill in one replay.

Read against NVIDIA-NeMo/RL, `nemo_rl/distributed/worker_groups.py`, commit 7ea279a (August 2026).
"""

from __future__ import annotations

import copy
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.experimental.compiled_dag_ref import CompiledDAGRef

from dagrl.embed.fleet import Call, Fleet
from dagrl.errors import DeadlineError, GraphError, LayoutError
from dagrl.runtime.graph import Arguments
from dagrl.runtime.replay import Replay

DISPATCHERS = (
    "run_all_workers_single_data",
    "run_all_workers_multiple_data",
    "run_all_workers_sharded_data",
    "run_single_worker_single_data",
)
"""The methods of a `RayWorkerGroup` that call workers. Each takes the name of the workers' method first."""


def accelerate(
    worker_group: Any, phases: Sequence[str], *, max_bytes: int = 64 << 20, deadline_s: float = 600.0
) -> AcceleratedGroup:
    """Returns `worker_group` with the workers' methods named in `phases` as replays of compiled graphs.

    `max_bytes`: the most that one worker takes or returns in a call. `deadline_s`: the longest that a call may take. What
    the group's methods return works with `ray.get` and `get_all_worker_results` as before; errors are PhaseErrors.

    Leave out methods that return generators, and methods that wait for a call of another group that comes later.
    Raises LayoutError for an object that is no such group, or whose sharding does not have its workers; GraphError for a
    method that the workers lack, or a group that is accelerated already; WorkerError for an actor that died.
    """
    _check(worker_group)
    role = re.sub(r"\W", "_", getattr(worker_group, "name_prefix", "")) or "workers"
    fleet = Fleet(worker_group.workers, phases, role=role, deadline_s=deadline_s, max_bytes=max_bytes)
    return AcceleratedGroup(worker_group, fleet)


class AcceleratedGroup:
    """A `RayWorkerGroup` some of whose calls are replays. Has all of its attributes; `fleet` has the graphs."""

    def __init__(self, worker_group: Any, fleet: Fleet) -> None:
        self.worker_group = worker_group
        self.fleet = fleet

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["worker_group"], name)
        return self._dispatcher(name, value) if name in DISPATCHERS else value

    def shutdown(self, *args: Any, **kwargs: Any) -> bool:
        """Ends the graphs, and then the workers as the group does."""
        self.fleet.close()
        ended: bool = self.worker_group.shutdown(*args, **kwargs)
        return ended

    def _dispatcher(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(method_name: str, *args: Any, **kwargs: Any) -> Any:
            if method_name not in self.fleet:
                return self.fleet.order.plain(lambda: plain(method_name, *args, **kwargs))
            recorders = [_Recorder(worker) for worker in range(len(self.worker_group.workers))]
            stand_in = copy.copy(self.worker_group)
            stand_in._workers = recorders
            returned = _keeping_values(getattr(type(stand_in), name))(stand_in, method_name, *args, **kwargs)
            replay = self.fleet.call(method_name, [recorder.call for recorder in recorders])
            for recorder in recorders:
                recorder.replay = replay
            return returned

        return dispatch


class ValueRef(CompiledDAGRef):  # type: ignore[misc]  # Ray has no types
    """A reference for `ray.get`, which asks references of this kind for their value, from a function.

    `read(timeout_s)` returns the value, or raises Ray's GetTimeoutError; None waits. `ray.wait` does not take such a
    reference, and it cannot be passed to another call. Its base is public in Ray (alpha).
    """

    def __init__(self, read: Callable[[float | None], Any]) -> None:
        self._read = read

    def get(self, timeout: float | None = None) -> Any:
        return self._read(timeout)

    def __str__(self) -> str:
        return f"ValueRef({self._read})"

    def __del__(self) -> None:
        """Nothing to release; Ray's own class drops a buffered result."""


class _Recorder:
    """Stands for an actor while NeMo-RL makes its calls: `recorder.method.remote(...)` keeps the arguments."""

    def __init__(self, worker: int) -> None:
        self.call: Call = None
        self.replay: Replay | None = None  # set when the call is sent
        self._worker = worker

    def __getattr__(self, method: str) -> Any:
        return types.SimpleNamespace(remote=self._record)

    def _record(self, *args: Any, **kwargs: Any) -> ValueRef:
        self.call = Arguments(tuple(map(_value, args)), {name: _value(value) for name, value in kwargs.items()})
        return ValueRef(self._result)

    def _result(self, timeout_s: float | None) -> Any:
        assert self.replay is not None, "the call was not sent"
        try:
            return self.replay.result(timeout_s)[self._worker]
        except DeadlineError as late:
            raise GetTimeoutError(str(late)) from late


def _value(argument: Any) -> Any:
    """Returns what Ray would pass for an argument: the object behind a reference, or the argument itself."""
    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument


def _keeping_values(method: Any) -> Callable[..., Any]:
    """Returns a method of NeMo-RL whose `ray.put` returns the value: a replay would only have to get it again."""
    plain = inspect.unwrap(method)
    without_put = types.SimpleNamespace(**{**vars(ray), "put": lambda value: value})
    scope = {**plain.__globals__, "ray": without_put}
    function = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
    function.__kwdefaults__ = plain.__kwdefaults__
    return function


def _check(worker_group: Any) -> None:
    if isinstance(worker_group, AcceleratedGroup):
        raise GraphError("this worker group is accelerated already; call accelerate() once, with all phases")
    missing = [name for name in ("workers", "sharding_annotations", *DISPATCHERS) if not hasattr(worker_group, name)]
    if missing:
        raise LayoutError(
            f"a {type(worker_group).__name__} has no {', '.join(missing)}; give accelerate() a RayWorkerGroup of NeMo-RL, "
            "such as policy.worker_group"
        )
    sharding, workers = worker_group.sharding_annotations, len(worker_group.workers)
    if sharding is None or not hasattr(sharding, "get_worker_coords"):
        raise LayoutError(
            f"the group's sharding_annotations are {sharding!r}; NeMo-RL's calls need a NamedSharding: make the group with "
            "RayWorkerGroup(..., sharding_annotations=...)"
        )
    if sharding.size != workers:
        raise LayoutError(
            f"the group's sharding {sharding.shape} has {sharding.size} ranks, but the group has {workers} workers; give it "
            "a NamedSharding of all of them"
        )
