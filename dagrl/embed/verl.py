"""verl's worker groups on phase graphs: the same methods, dispatch and results, with replays instead of actor calls.

    from dagrl.embed.verl import accelerate

    trainer.training_client = accelerate(trainer.training_client)     # the one line; verl's loop goes on as it is

Works for plain `RayWorkerGroup`s, for colocated ones (`create_colocated_worker_cls` and `spawn`) and for fused ones
(`create_colocated_worker_raw_cls`). How a method's arguments are shared out and its results put together is read from its
`@register(...)`. Tested with verl 0.9.1 (`make test-peers`).

One graph serves all groups on the same actors, with one node per actor: `execute_with_func_generator`, a method of every
verl worker that calls any function with the worker. The method to run is part of the input.

verl copies each worker's rows and pickles them into Ray's object store. Here batches are cut as verl cuts them, and the
tensors of each part are written straight into shared memory (`TensorRows`), as are the results of workers.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagrl.embed.fleet import Call, Fleet
from dagrl.errors import GraphError, MissingDependencyError
from dagrl.runtime.edges.pickling import register_reducer
from dagrl.runtime.graph import Arguments
from dagrl.runtime.replay import Replay

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CallArguments = tuple[Sequence[Any], Mapping[str, Any]]

RUN = "execute_with_func_generator"

_fleets: weakref.WeakValueDictionary[tuple[str, ...], Fleet] = weakref.WeakValueDictionary()  # by the ids of their actors


def accelerate(
    worker_group: Any, phases: Sequence[str] | None = None, *, deadline_s: float = 3600.0, max_bytes: int = 1 << 30
) -> Any:
    """Returns a copy of a verl `RayWorkerGroup` on the same actors, whose methods run as replays of one phase graph.

    `phases`: the methods that run so; by default all that have a known dispatch mode and do not return object references.
    All others run as before, in the order of the calls. `deadline_s`: the longest that a call may take. `max_bytes`: the
    most that one worker takes or returns in a call; memory is taken as it is used. Groups on the same actors share one
    graph. `close()` of the returned group ends it; the actors live on.

    Raises GraphError for a method that the group lacks or that cannot run so, or for other limits than those of another
    accelerated group on the actors; WorkerError if an actor has died; MissingDependencyError without verl.
    """
    bound = _bound_methods(worker_group)
    methods = {name: _method_of(worker_group, name, bound) for name in (bound if phases is None else phases)}
    refused = {name: method for name, method in methods.items() if isinstance(method, str)}
    if phases is not None and refused:
        raise GraphError("; ".join(refused.values()) + ". Leave it out of `phases`: it then runs as verl runs it")
    fleet = _fleet_of(worker_group.workers, deadline_s, max_bytes)
    group = copy.copy(worker_group)
    for name, functor in bound.items():
        method = methods.get(name)
        accelerated = Accelerated(worker_group, fleet, method) if isinstance(method, Method) else None
        setattr(group, name, accelerated or functools.partial(_plain, fleet, functor))
    group.close = fleet.close
    logger.info("verl methods on graphs: %s", ", ".join(sorted(set(methods) - set(refused))))
    return group


@dataclass(frozen=True)
class Method:
    """A method of a verl worker group. `prefix` comes before the arguments of each call on a worker.

    `dispatch` gives the arguments of all workers, `collect` puts the results together; both take the group first.
    """

    name: str
    prefix: tuple[Any, ...]
    dispatch: Callable[..., CallArguments]
    collect: Callable[[Any, Any], Any]
    rank_zero: bool
    blocking: bool


@dataclass(frozen=True)
class Accelerated:
    """A bound method of a group that runs as a replay."""

    group: Any
    fleet: Fleet
    method: Method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from verl.protocol import _padding_size_key

        by_name = {name: _materialized(value) for name, value in kwargs.items()}
        arguments, named = self.method.dispatch(self.group, *map(_materialized, args), **by_name)
        named = dict(named)
        padding = named.pop(_padding_size_key, 0)
        replay = self.fleet.call(RUN, self._parts(arguments, named))
        collect = functools.partial(self._collected, replay, padding)
        return collect() if self.method.blocking else _pending_class()(collect)

    def _parts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
        """Returns the arguments of every worker; those of workers that are given the same are one object."""
        workers = len(self.group.workers)
        if self.method.rank_zero:
            return [self._part(args, kwargs), *[None] * (workers - 1)]
        values = [*args, *kwargs.values()]
        if not all(isinstance(each, list) and len(each) == workers for each in values):  # as in verl's execute_all
            return [self._part(args, kwargs)] * workers
        distinct: dict[tuple[int, ...], Arguments] = {}
        parts: list[Call] = []
        for rank in range(workers):
            key = tuple(id(each[rank]) for each in values)
            if key not in distinct:
                named = {name: each[rank] for name, each in kwargs.items()}
                distinct[key] = self._part([each[rank] for each in args], named)
            parts.append(distinct[key])
        return parts

    def _part(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        return Arguments((_run_method, *self.method.prefix, *args), kwargs)

    def _collected(self, replay: Replay, padding: int) -> Any:
        try:
            results = replay.result()
        except Exception as error:
            error.add_note(f"in the method {self.method.name!r} of a verl worker group")
            raise
        output = self.method.collect(self.group, results[0] if self.method.rank_zero else results)
        return _without_padding(output, padding) if padding else output


def _run_method(worker: object, name: str, *args: object, **kwargs: object) -> object:
    """Runs a method of the worker. On the worker."""
    return getattr(worker, name)(*args, **kwargs)


def _fleet_of(actors: Sequence[Any], deadline_s: float, max_bytes: int) -> Fleet:
    """Returns the fleet on these actors, with the phase `RUN`: that of another worker group on them, or a new one."""
    key = tuple(actor._actor_id.hex() for actor in actors)
    fleet = _fleets.get(key)
    if fleet is not None and not fleet.closed and fleet.limits != (deadline_s, max_bytes):
        raise GraphError(
            "another accelerated group on these actors has deadline_s={:g} and max_bytes={}; give the same, or close() that "
            "group first".format(*fleet.limits)
        )
    if fleet is None or fleet.closed:
        register_reducers()
        fleet = _fleets[key] = Fleet(
            actors, [RUN], role="verl", deadline_s=deadline_s, max_bytes=max_bytes, prepare=register_reducers
        )
    return fleet


def _plain(fleet: Fleet, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a method of verl's own, after all replays; later replays wait until it has ended on the workers."""
    return fleet.order.plain(lambda: function(*args, **kwargs))


def _bound_methods(worker_group: Any) -> dict[str, Any]:
    """Returns the methods that verl bound to the group from `@register`, by name."""
    try:
        from verl.single_controller.ray import RayWorkerGroup
    except ImportError as missing:
        raise MissingDependencyError(f"verl cannot be imported ({missing}); pip install verl") from missing
    if not isinstance(worker_group, RayWorkerGroup):
        raise GraphError(f"accelerate() takes a verl RayWorkerGroup, but was given a {type(worker_group).__name__}")
    if any(isinstance(value, Accelerated) for value in vars(worker_group).values()):
        raise GraphError("this worker group is accelerated already; call accelerate() on the group that verl made")
    return {
        name: value
        for name, value in vars(worker_group).items()
        if any(kind.__qualname__ == _FUNCTOR for kind in type(value).__mro__)
        and _attributes(worker_group, _target(value)) is not None
    }


_FUNCTOR = "func_generator.<locals>.Functor"  # the class that verl derives a bound method's class from


def _target(functor: Any) -> str:
    """Returns the name of the actor's method, which is the name of the functor's class."""
    return type(functor).__name__


def _attributes(worker_group: Any, method: str) -> dict[str, Any] | None:
    """Returns the attributes that `@register` sets on the workers' method; None if there is no such method."""
    from verl.single_controller.base.decorator import MAGIC_ATTR

    actor_class = worker_group.ray_cls_with_init
    if actor_class is None:
        return None
    workers = actor_class.cls.raw_cls_dict.get(worker_group.sub_cls_name) if worker_group.sub_cls_name else None
    attributes = getattr(getattr(workers, method, None), MAGIC_ATTR, None) or getattr(
        getattr(actor_class.cls, method, None), MAGIC_ATTR, None
    )
    return attributes if isinstance(attributes, dict) else None


def _method_of(worker_group: Any, name: str, bound: Mapping[str, Any]) -> Method | str:
    """Returns a method, or why it cannot run as a replay. Raises GraphError if the group has no such method."""
    from verl.single_controller.base.decorator import Execute, collect_all_to_all, collect_dp_compute

    if name not in bound:
        raise GraphError(
            f"the worker group has no method {name!r}; it has {', '.join(sorted(bound)) or 'none'}. Correct the name, or "
            "register the method: @register(dispatch_mode=...)"
        )
    target = _target(bound[name])
    attributes = _attributes(worker_group, target)
    assert attributes is not None, name
    rank_zero = attributes["execute_mode"] == Execute.RANK_ZERO
    functions = _functions(attributes["dispatch_mode"])
    if functions is None:
        return f"{name!r} has the dispatch mode {attributes['dispatch_mode']!r}, which is not one of verl's own"
    dispatch, collect = functions
    if not attributes["blocking"] and (rank_zero or collect in (collect_all_to_all, collect_dp_compute)):
        return f"{name!r} does not block and returns object references, which a replay does not make"
    fused = worker_group.fused_worker_used and target not in worker_group.method_names
    entry = worker_group.fused_worker_execute_fn_name
    prefix = (entry, f"{worker_group.sub_cls_name}_fwmn_{target}") if fused else (target,)
    return Method(name, prefix, dispatch, collect, rank_zero, attributes["blocking"])


def _functions(mode: Any) -> tuple[Callable[..., CallArguments], Callable[[Any, Any], Any]] | None:
    """Returns how a dispatch mode shares out arguments and puts results together; None if it is not one of verl's."""
    from verl.single_controller.base import decorator as verl

    supported = {
        verl.Dispatch.ONE_TO_ALL,
        verl.Dispatch.ALL_TO_ALL,
        verl.Dispatch.DP_COMPUTE,
        verl.Dispatch.DP_COMPUTE_PROTO,
        verl.Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
        verl.Dispatch.DP_COMPUTE_METRIC,
    }
    if not isinstance(mode, dict):
        functions = verl.DISPATCH_MODE_FN_REGISTRY[mode] if mode in supported else None
        return functions and (functions["dispatch_fn"], functions["collect_fn"])
    dispatch, collect = mode["dispatch_fn"], mode["collect_fn"]
    if getattr(dispatch, "func", None) is not verl.dispatch_lazy_compute_data_proto:
        return None
    return functools.partial(_dispatch_over_mesh, *dispatch.args), collect


def _dispatch_over_mesh(mesh: str, group: Any, *args: Any, **kwargs: Any) -> CallArguments:
    """Gives each worker the part of its rank in `mesh`: `dispatch_lazy_compute_data_proto` without the object store."""
    for info, query in ((group._dispatch_info, "_query_dispatch_info"), (group._collect_info, "_query_collect_info")):
        if mesh not in info:
            info[mesh] = getattr(group, query)(mesh)
    ranks = group._dispatch_info[mesh]
    size = max(ranks) + 1

    def of_workers(batch: Any) -> list[Any]:
        parts = chunks(batch, size)
        return [parts[rank] for rank in ranks]

    return [of_workers(arg) for arg in args], {name: of_workers(arg) for name, arg in kwargs.items()}


def _materialized(value: Any) -> Any:
    """Reads a result that is still under way, as verl's workers do when they are given one."""
    from verl.protocol import DataProtoFuture

    return value.get() if isinstance(value, DataProtoFuture) else value


@functools.cache
def _pending_class() -> type:
    """Returns the class of a `DataProtoFuture` whose `get` calls a function, once."""
    from verl.protocol import DataProtoFuture

    class Pending(DataProtoFuture):  # type: ignore[misc]
        """The result of a non-blocking method."""

        def __init__(self, collect: Callable[[], Any]) -> None:
            super().__init__(collect_fn=None, futures=[])
            self._once = functools.cache(collect)

        def get(self) -> Any:
            return self._once()

        def chunk(self, chunks: int) -> list[Any]:
            from verl.protocol import BatchData

            return list(BatchData(self.get()).chunk(chunks=chunks))

    return Pending


def _without_padding(output: Any, padding: int) -> Any:
    """Drops the rows that verl's dispatch has added, as its own methods do."""
    from verl import DataProto

    if isinstance(output, DataProto):
        return output.select_idxs(list(range(len(output)))[:-padding])
    return output[:-padding] if isinstance(output, list) else output


Jagged = tuple[Any, Any]  # values and offsets of a nested tensor with the layout `torch.jagged`


def register_reducers(worker: object = None) -> None:
    """Makes this process write DataProtos and nested tensors on edges by their tensors. Runs in driver and workers."""
    from torch.nested._internal.nested_tensor import NestedTensor
    from verl import DataProto

    register_reducer(DataProto, _reduce_data_proto)
    register_reducer(NestedTensor, _reduce_nested)


def _reduce_data_proto(data: Any) -> tuple[Any, ...]:
    """Reduces a DataProto to the three fields that its own `__getstate__` has."""
    return _data_proto, (data.batch, data.non_tensor_batch, data.meta_info)


def _data_proto(batch: Any, non_tensor_batch: Any, meta_info: Any) -> Any:
    from verl import DataProto

    return DataProto(batch=batch, non_tensor_batch=non_tensor_batch, meta_info=meta_info)


def _reduce_nested(nested: Any) -> Any:
    """Reduces a plain jagged tensor to values and offsets, any other one as torch does."""
    if _is_plain(nested):
        return _nested, (nested.values().detach(), nested.offsets(), nested.requires_grad)
    return nested.__reduce_ex__(5)


def _is_plain(nested: Any) -> bool:
    """Returns whether values and offsets describe it: on the CPU, without holes, ragged in the dimension after the rows."""
    return nested.device.type == "cpu" and nested.lengths() is None and nested._ragged_idx == 1


def _nested(values: Tensor, offsets: Tensor, requires_grad: bool = False) -> Any:
    import torch

    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    return nested.requires_grad_() if requires_grad else nested


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Some rows of a TensorDict, which arrive as a TensorDict. `jagged` are those of its nested tensors."""

    rows: Any
    jagged: Mapping[str, Jagged]

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensor_dict, (self.rows, dict(self.jagged))


def _tensor_dict(rows: Any, jagged: Mapping[str, Jagged]) -> Any:
    for key, (values, offsets) in jagged.items():
        rows[key] = _nested(values, offsets)
    return rows


def chunks(batch: Any, count: int) -> Sequence[Any]:
    """Cuts a batch into `count` parts, with the rows that `BatchData(batch).chunk(count)` of verl would give each."""
    from tensordict import TensorDict
    from verl.protocol import BatchData

    even = type(batch) is TensorDict and len(batch) % count == 0
    nested = {key: value for key, value in batch.items() if getattr(value, "is_nested", False)} if even else {}
    if not even or not all(map(_is_plain, nested.values())):
        parts: Sequence[Any] = BatchData(batch).chunk(count)
        return parts
    dense = TensorDict(
        {key: value for key, value in batch.items() if key not in nested}, batch_size=batch.batch_size, device=batch.device
    )
    cut = {key: _cut(value, count) for key, value in nested.items()}
    return [TensorRows(rows, {key: cut[key][at] for key in cut}) for at, rows in enumerate(dense.chunk(count))]


def _cut(nested: Any, count: int) -> list[Jagged]:
    values, offsets = nested.values().detach(), nested.offsets()
    each = (len(offsets) - 1) // count
    bounds = offsets[::each].tolist()
    return [
        (values[begin:end], offsets[at * each : (at + 1) * each + 1] - begin)
        for at, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
