"""PhaseGraph: the nodes and edges of one phase over the workers of one graph, as plain data.

It does not depend on Ray, so it can be compared, drawn and tested alone. Nodes are in topological order. A node's arguments
are the phase's input, other nodes' results, or constants: any objects that pickle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dagrl.errors import GraphError


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call, which `Shard.spread` passes to a method: `method(*args, **kwargs)`."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerRef:
    """A worker of a graph: its role, and its position among the role's workers in the graph."""

    role: str
    position: int


@dataclass(frozen=True)
class InputRef:
    """An argument that is the phase's input."""


@dataclass(frozen=True)
class NodeRef:
    """An argument that is another node's result."""

    node: int


@dataclass(frozen=True)
class Constant:
    """An argument fixed when the phase was traced."""

    value: object


ArgumentRef = InputRef | NodeRef | Constant

SHARED_MEMORY = "shm"  # the default transport: shared memory within a host, TCP between hosts
Source = int | None  # the source of a value: a node's number, or None for the phase's input


@dataclass(frozen=True)
class Node:
    """One call on one worker.

    `kind`: `call` runs `method(*args)`, `reduce` runs `method([*args])`, `collect` makes a list of its arguments and
    flattens those that `collect` made, `relay` passes on its only argument, `spread` runs `method(*args, **kwargs)` with the
    `Arguments` that are its only argument. `keywords` names the last arguments of a call. `transport` carries the result to
    its readers.
    """

    number: int
    worker: WorkerRef
    method: str
    kind: str
    args: tuple[ArgumentRef, ...]
    constants: tuple[tuple[str, object], ...] = ()
    keywords: tuple[str, ...] = ()
    transport: str = SHARED_MEMORY

    @property
    def label(self) -> str:
        """Short name for errors and drawings, e.g. `train[0].train_step`."""
        return f"{self.worker.role}[{self.worker.position}].{self.method or self.kind}"

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources that it reads, in the order of its arguments."""
        return tuple(arg.node if isinstance(arg, NodeRef) else None for arg in self.args if not isinstance(arg, Constant))

    @property
    def upstream(self) -> tuple[int, ...]:
        """Numbers of the nodes whose results it reads."""
        return tuple(source for source in self.sources if source is not None)

    def remapped(self, number: int, source: Callable[[Source], Source]) -> Node:
        """Returns the node with another number. `source` maps each source that it reads to a new one."""
        return dataclasses.replace(self, number=number, args=tuple(_remapped(arg, source) for arg in self.args))


def _remapped(arg: ArgumentRef, source: Callable[[Source], Source]) -> ArgumentRef:
    if isinstance(arg, Constant):
        return arg
    new = source(arg.node if isinstance(arg, NodeRef) else None)
    return InputRef() if new is None else NodeRef(new)


@dataclass(frozen=True)
class PhaseGraph:
    """A traced phase: `widths` are the workers of each role in one graph, `outputs` the nodes that the driver reads: one, or
    the items of a list (`passes.py`).

    `aliases`: workers on the actor of an earlier one, and that one.
    """

    phase: str
    widths: Mapping[str, int]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    aliases: Mapping[WorkerRef, WorkerRef] = field(default_factory=dict)

    def actor(self, worker: WorkerRef) -> WorkerRef:
        """Returns the first worker of the graph on the same actor."""
        return self.aliases.get(worker, worker)

    def validate(self) -> None:
        """Raises GraphError for a phase that does not use a result."""
        read = {number for node in self.nodes for number in node.upstream} | set(self.outputs)
        for node in self.nodes:
            if node.number not in read:
                raise GraphError(
                    f"phase {self.phase!r}: the result of node {node.label} is not used; return it, or join() it"
                )
