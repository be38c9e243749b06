"""Phases: Python functions over shards, traced into a `PhaseGraph` of plain data.

A phase is traced once, without Ray. The shards that it is called with record the calls on their workers.

    @phase
    def train_step(train: Shard, batch):
        metrics = train.map("train_step", batch)        # every worker of the shard
        return train.reduce("merge_metrics", metrics)   # joined on the workers, in a tree

Parameters annotated `Shard` are worker groups, matched by name to a role. The one other parameter is the phase's input.
Tracing finds mistakes; each error names the phase, the node and what to write instead.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, get_args, get_origin, get_type_hints, overload

from dagrl.errors import GraphError
from dagrl.runtime.graph import SHARED_MEMORY, ArgumentRef, Constant, InputRef, Node, NodeRef, PhaseGraph, WorkerRef
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import InputSpec, field_types


def group_transports(gpus_per_worker: float) -> frozenset[str]:
    """Returns the transports that workers with this many GPUs each can use."""
    return frozenset({SHARED_MEMORY, "nccl"} if gpus_per_worker else {SHARED_MEMORY})


@dataclass(frozen=True)
class Role:
    """A worker group as tracing sees it: its layout, its workers' methods (without `self`), its transports."""

    name: str
    layout: ParallelLayout
    methods: Mapping[str, inspect.Signature]
    transports: frozenset[str] = frozenset({SHARED_MEMORY})


def methods_of(worker_class: type) -> dict[str, inspect.Signature]:
    """Returns the signatures, without `self`, of the methods of a worker class."""
    methods = {}
    for name, member in inspect.getmembers(worker_class, inspect.isfunction):
        if not name.startswith("__") and not isinstance(inspect.getattr_static(worker_class, name), staticmethod):
            methods[name] = without_self(_signature(member))
    return methods


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """Returns a signature, with types for annotations that are text, if all of them can be evaluated."""
    signature, types = inspect.signature(function), dict[str, object]()
    with suppress(Exception):  # names that only type checkers import
        types = get_type_hints(function)  # Ray leaves text in the signatures of its actors' classes
    parameters = [one.replace(annotation=types.get(name, one.annotation)) for name, one in signature.parameters.items()]
    return signature.replace(parameters=parameters)


def without_self(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature of a method as its callers see it, also after Ray has added a parameter to it."""
    parameters = list(signature.parameters.values())[1:]
    return signature.replace(parameters=[one for one in parameters if one.name != "_ray_trace_ctx"])


@dataclass(frozen=True)
class Value:
    """The result of one node, or of one node on each worker of a shard."""

    tracer: Tracer = field(repr=False)
    nodes: tuple[int, ...]

    def via(self, transport: str) -> Value:
        """Sends the value to its readers over `transport` (`nccl`, `shm`). Returns the same value."""
        self.tracer.set_transport(self.nodes, transport)
        return self


@dataclass(frozen=True)
class Input:
    """The phase's input as the traced function sees it. It can only be passed on."""

    name: str


Argument = object  # a `Value`, an `Input`, or else a constant


@dataclass(frozen=True)
class Shard:
    """The workers of one role that one graph covers, or some of them."""

    tracer: Tracer
    role: Role
    workers: tuple[int, ...]  # positions among the role's workers in the graph

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Shard]:
        return (Shard(self.tracer, self.role, (worker,)) for worker in self.workers)

    def __getitem__(self, position: int | slice) -> Shard:
        """Returns one worker, or several, as a shard. Raises GraphError if there are none."""
        try:
            chosen = self.workers[position]
        except IndexError:
            raise self.tracer.error(
                f"{self.role.name}[{position}] is outside a shard of {len(self)} workers; count from 0"
            ) from None
        if isinstance(position, slice) and not chosen:
            raise self.tracer.error(
                f"{position} selects none of the {len(self)} {self.role.name} workers; select some, or skip these nodes if "
                f"len({self.role.name}) is too small"
            )
        return Shard(self.tracer, self.role, chosen if isinstance(chosen, tuple) else (chosen,))

    def map(self, method: str, /, *args: Argument, **named: Argument) -> Value:
        """Calls `method` on every worker, with these positional and keyword arguments.

        A `Value` of as many nodes is passed worker by worker, one of a single node to all. Anything else is a constant.
        """
        keywords = tuple(name for name, arg in named.items() if isinstance(arg, Input | Value))
        constants = {name: arg for name, arg in named.items() if not isinstance(arg, Input | Value)}
        given = (*args, *(named[name] for name in keywords))
        nodes = tuple(
            self.tracer.add(self.role, worker, method, "call", self._arguments(method, given, position), constants, keywords)
            for position, worker in enumerate(self.workers)
        )
        return Value(self.tracer, nodes)

    def spread(self, method: str, arguments: Input | Value) -> Value:
        """Calls `method` on every worker with all arguments of a call: `arguments` is an `Arguments` at replay.

        For callers that decide at each replay what to pass, as the methods of somebody else's worker group do. A worker
        whose part is None is left out: its result is None.
        """
        nodes = tuple(
            self.tracer.add(self.role, worker, method, "spread", self._arguments(method, (arguments,), position))
            for position, worker in enumerate(self.workers)
        )
        return Value(self.tracer, nodes)

    def reduce(self, method: str, parts: Value) -> Value:
        """Joins `parts` by `method(list) -> value`, which must be associative, on the workers that hold them, in a tree."""
        return self.tracer.tree(self.role, method, parts, kind="reduce")

    def stages(self) -> tuple[Shard, ...]:
        """Returns the workers of each pipeline stage, first stage first."""
        stage_size = self.role.layout.tp * self.role.layout.cp
        by_stage: dict[int, list[int]] = {}
        for worker in self.workers:
            by_stage.setdefault(worker % self.role.layout.shard_size // stage_size, []).append(worker)
        return tuple(Shard(self.tracer, self.role, tuple(by_stage[stage])) for stage in sorted(by_stage))

    def _arguments(self, method: str, args: Sequence[Argument], position: int) -> tuple[ArgumentRef, ...]:
        return tuple(self._argument(method, arg, position) for arg in args)

    def _argument(self, method: str, arg: Argument, position: int) -> ArgumentRef:
        if isinstance(arg, Input):
            return InputRef()
        if not isinstance(arg, Value):
            self.tracer.check_constant(f"{self.role.name}.{method}", arg)
            return Constant(arg)
        self.tracer.check_own(f"{self.role.name}.{method}", arg)
        if len(arg.nodes) not in (1, len(self)):
            raise self.tracer.error(
                f"{self.role.name}.{method}: an argument has {len(arg.nodes)} values for {len(self)} workers; "
                "pass one value for each worker, or a single one (shard.reduce makes one)"
            )
        return NodeRef(arg.nodes[0] if len(arg.nodes) == 1 else arg.nodes[position])


def join(*values: Value) -> Value:
    """Joins all given values into a list on the first worker, in the order given, in a tree."""
    if not values:
        raise GraphError("join() needs at least one value")
    tracer = values[0].tracer
    for value in values:
        tracer.check_own("join()", value)
    return tracer.tree(None, "", Value(tracer, tuple(node for value in values for node in value.nodes)), kind="collect")


PhaseFunction = Callable[..., Value]


@dataclass(eq=False)
class Tracer:
    """Records the nodes of one phase while its function runs."""

    phase: str
    roles: Mapping[str, Role]
    arity: int
    nodes: list[Node] = field(default_factory=list)

    def error(self, message: str) -> GraphError:
        return GraphError(f"phase {self.phase!r}: {message}")

    def add(
        self,
        role: Role,
        worker: int,
        method: str,
        kind: str,
        args: tuple[ArgumentRef, ...],
        constants: Mapping[str, object] | None = None,
        keywords: tuple[str, ...] = (),
    ) -> int:
        constants = dict(constants or {})
        for name, constant in constants.items():
            self.check_constant(f"{role.name}.{method}, argument {name!r}", constant)
        if kind != "collect" and method not in role.methods:
            raise self.error(
                f"the {role.name} worker has no method {method!r}; it has "
                f"{', '.join(sorted(name for name in role.methods if not name.startswith('_'))) or 'none'}. "
                "Correct the name, or add the method to the worker"
            )
        if kind in ("call", "reduce"):
            places = len(args) - len(keywords)
            named: dict[str, ArgumentRef] = {name: Constant(constant) for name, constant in constants.items()}
            named |= zip(keywords, args[places:], strict=True)
            self._check_arguments(role, method, args[: 1 if kind == "reduce" else places], named)
        if not any(isinstance(arg, InputRef | NodeRef) for arg in args):
            raise self.error(
                f"node {role.name}.{method} does not depend on the input; pass it the phase's input or another node's value"
            )
        number = len(self.nodes)
        fixed = tuple(sorted(constants.items()))
        self.nodes.append(Node(number, WorkerRef(role.name, worker), method, kind, args, fixed, keywords))
        return number

    def check_constant(self, where: str, constant: object) -> None:
        """Raises GraphError for a container with values of a replay, which would be a constant."""
        if any(isinstance(part, Input | Value) for part in _parts(constant)):
            raise self.error(
                f"node {where}: {reprlib.repr(constant)} contains a value of the replay; pass that as an argument of its own"
            )

    def check_own(self, where: str, value: Value) -> None:
        """Raises GraphError unless `value` is a value of this trace."""
        if not isinstance(value, Value) or value.tracer is not self:
            raise self.error(
                f"{where} was given {reprlib.repr(value)}, which is not from a map, reduce or join of this phase; "
                "pass a value that one of them returned"
            )

    def check_readers(self) -> None:
        """Raises GraphError for a transport that a node's writer can use and its reader cannot."""
        for node in self.nodes:
            for number in node.upstream:
                written = self.nodes[number]
                available = self.roles[node.worker.role].transports
                if written.transport not in available:
                    raise self.error(
                        f"node {node.label} reads {written.label} via {written.transport!r}, which the {node.worker.role} "
                        f"group cannot use; it has {', '.join(sorted(available))}. Send the value over one of these"
                    )

    def check_output(self, number: int) -> None:
        """Raises GraphError for an output over a transport that the driver, which reads it, cannot use."""
        if self.nodes[number].transport != SHARED_MEMORY:
            raise self.error(
                f"node {self.nodes[number].label} is an output via {self.nodes[number].transport!r}, but the driver "
                f"only reads {SHARED_MEMORY!r}; remove the .via(), or return another node's value"
            )

    def _check_arguments(
        self, role: Role, method: str, args: Sequence[ArgumentRef], named: Mapping[str, ArgumentRef]
    ) -> None:
        """Raises GraphError for arguments that do not fit the signature, or a constant that is not in its `Literal`."""
        signature, node = role.methods[method], f"node {role.name}.{method}"
        try:
            bound = signature.bind(*args, **named)
        except TypeError as mistake:
            raise self.error(
                f"{node} is called with {len(args)} positional arguments and {sorted(named) or 'none'} by name, but its "
                f"signature is {method}{signature}: {mistake}"
            ) from None
        for name, arg in bound.arguments.items():
            kind = signature.parameters[name].annotation
            if isinstance(arg, Constant) and get_origin(kind) is Literal and arg.value not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise self.error(f"{node} is called with {name}={arg.value!r}; choose one of {choices}")

    def tree(self, role: Role | None, method: str, parts: Value, kind: str) -> Value:
        """Joins nodes `arity` at a time, each join on the worker of its first part."""
        self.check_own(f"reduce({method!r})" if role else "join()", parts)
        if role is not None and any(self.nodes[node].worker.role != role.name for node in parts.nodes):
            raise self.error(
                f"{role.name}.reduce({method!r}) was given values of another role; reduce them on their own shard"
            )
        level = parts.nodes
        while True:
            groups = [level[start : start + self.arity] for start in range(0, len(level), self.arity)]
            level = tuple(self._join(method, group, kind) for group in groups)
            if len(level) == 1:
                return Value(self, level)

    def _join(self, method: str, group: Sequence[int], kind: str) -> int:
        worker = self.nodes[group[0]].worker
        args: tuple[ArgumentRef, ...] = tuple(NodeRef(node) for node in group)
        return self.add(self.roles[worker.role], worker.position, method, kind, args)

    def set_transport(self, nodes: Sequence[int], transport: str) -> None:
        for number in nodes:
            node = self.nodes[number]
            available = self.roles[node.worker.role].transports
            if transport not in available:
                raise self.error(
                    f"node {node.label}: transport {transport!r} cannot be used by the {node.worker.role} group; "
                    f"it has {', '.join(sorted(available))}. Use one of these, or run on a machine that has {transport}"
                )
            self.nodes[number] = replace(node, transport=transport)


@dataclass(frozen=True)
class Phase:
    """A phase function, and the fields of the batches that it takes (`inputs`; None if its input is not a batch)."""

    name: str
    function: PhaseFunction
    inputs: InputSpec | None = None
    roles: tuple[str, ...] = field(default=())

    def trace(self, roles: Mapping[str, Role], arity: int = 8) -> PhaseGraph:
        """Returns the phase's graph over `roles`. Values are joined `arity` (at least 2) at a time. Raises GraphError."""
        missing = [role for role in self.roles if role not in roles]
        if missing:
            raise GraphError(
                f"phase {self.name!r} needs worker groups {', '.join(missing)}; there are {', '.join(roles) or 'none'}. "
                "Name the phase's Shard parameters after the groups"
            )
        mine = {name: roles[name] for name in self.roles}
        replicas = replicas_per_graph({name: role.layout.dp for name, role in mine.items()})
        tracer = Tracer(self.name, mine, arity)
        shards = {
            name: Shard(tracer, role, tuple(range(replicas[name] * role.layout.shard_size))) for name, role in mine.items()
        }
        output = self._output(tracer, self.function(**shards, **{self.input_name: Input(self.input_name)}))
        tracer.check_readers()
        tracer.check_output(output)
        widths = {name: len(shard) for name, shard in shards.items()}
        graph = PhaseGraph(self.name, widths, tuple(tracer.nodes), (output,))
        graph.validate()
        return graph

    @property
    def input_name(self) -> str:
        """Name of the parameter that takes the phase's input."""
        return next(name for name in inspect.signature(self.function).parameters if name not in self.roles)

    def _output(self, tracer: Tracer, value: object) -> int:
        """Returns the node whose result is the returned value; of a value of several nodes, their join."""
        if not isinstance(value, Value):
            raise tracer.error(f"it returns {value!r}; return a value from map, reduce or join, which makes one of several")
        tracer.check_own("its result", value)
        return (value if len(value.nodes) == 1 else join(value)).nodes[0]


def replicas_per_graph(shards: Mapping[str, int]) -> dict[str, int]:
    """Returns how many replicas of each role are in one graph: the fewest that divide every role's shards among the graphs.

    One role: one replica per graph. Train dp 4 with generation dp 2: two graphs, each of two and one replicas.
    """
    graphs = math.gcd(*shards.values())
    return {role: count // graphs for role, count in shards.items()}


@overload
def phase(function: PhaseFunction) -> Phase: ...


@overload
def phase(*, inputs: InputSpec | None = None) -> Callable[[PhaseFunction], Phase]: ...


def phase(
    function: PhaseFunction | None = None, *, inputs: InputSpec | None = None
) -> Phase | Callable[[PhaseFunction], Phase]:
    """Makes a `Phase` of a function: `@phase`, or `@phase(inputs={...})` for one that takes a `Batch`."""
    if function is None:
        return functools.partial(phase, inputs=inputs)
    name = function.__name__
    parameters = inspect.signature(function).parameters
    roles = tuple(key for key, parameter in parameters.items() if _is_shard(parameter.annotation))
    others = [key for key in parameters if key not in roles]
    if not roles:
        raise GraphError(f"phase {name!r} has no parameter annotated Shard; write e.g. def {name}(train: Shard, batch)")
    if len(others) != 1:
        raise GraphError(
            f"phase {name!r} takes {len(others)} inputs {others}; it takes exactly one in addition to its "
            "shards (put several values into one batch)"
        )
    dtype, dimensions = field_types(inputs or {})["lengths"]
    if dtype.kind not in "iu" or dimensions != 1:
        raise GraphError(
            f"phase {name!r}: `lengths` of its inputs is {dtype} [rows{', tokens' * (dimensions - 1)}]; expected one "
            'integer per row: Field("int64", "row"), or leave it out'
        )
    return Phase(name, function, inputs, roles)


def _is_shard(annotation: object) -> bool:
    """Annotations are strings in modules that begin with `from __future__ import annotations`."""
    return annotation is Shard or (isinstance(annotation, str) and annotation.rpartition(".")[2] == Shard.__name__)


def _parts(value: object) -> Iterator[object]:
    """Yields a value, and what it contains if it is a container."""
    yield value
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parts(item)
