"""Notices deaths of actors with live graphs. No pending call of Ray's tells: loops run on threads of their own."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from ray.actor import ActorHandle
from ray.exceptions import RayError

POLL_S = 0.02
"""How often this process looks at the states of actors. Ray pushes them; a look at one takes 0.4 us."""

ALIVE = 2
"""`ActorTableData.ALIVE` of Ray's gcs.proto."""


class Graph(Protocol):
    """A graph that is notified once when one of its actors dies."""

    def on_death(self) -> None:
        """Called on the watching thread; must not block."""


_lock = threading.Lock()
_watched: dict[int, tuple[weakref.ref[Graph], Sequence[ActorHandle]]] = {}


def watch(graph: Graph, actors: Sequence[ActorHandle]) -> None:
    """Calls `graph.on_death()` once one of `actors`, on which it has called methods, dies. `unwatch` ends that."""
    with _lock:
        _watched[id(graph)] = weakref.ref(graph), actors
        if len(_watched) == 1:
            threading.Thread(target=_watch, name="dagrl-deaths", daemon=True).start()


def unwatch(graph: Graph) -> None:
    with _lock:
        _watched.pop(id(graph), None)


def _watch() -> None:
    """Looks until no graph is watched."""
    while True:
        with _lock:
            alive: dict[str, bool] = {}  # by id: many graphs have the same actors
            for key, (reference, actors) in list(_watched.items()):
                graph = reference()
                died = not all([_is_alive(actor, alive) for actor in actors])
                if graph is None or died:
                    del _watched[key]
                if graph is not None and died:
                    graph.on_death()
                del graph
            if not _watched:
                return
        time.sleep(POLL_S)


def _is_alive(actor: ActorHandle, known: dict[str, bool]) -> bool:
    name = actor._actor_id.hex()
    if name not in known:
        try:
            known[name] = actor._get_local_state() in (ALIVE, None)
        except RayError:  # this process has left the cluster
            known[name] = False
    return known[name]
