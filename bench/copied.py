"""Bytes that a step copies into shared memory: counted in dagrl's edges, computed for Ray's calls and graphs.

Phases under the eager executor are plain calls, so theirs are computed too.

Counted are the bytes written to rings, mailboxes and links, and those copied out of them, in the driver and in all workers.
Ray counts nothing; what it copies follows from what it writes:

- a compiled graph's channel holds one serialized value for each node that writes it, whatever the number of readers on the
  host (`ray/experimental/channel/shared_memory_channel.py`);
- a call's argument or result of up to 100 KiB travels inside the message (`max_direct_call_object_size`), a larger one is
  written to the object store, for each call that it is passed to; `ray.put` writes it there once, whatever its size.
"""

from __future__ import annotations

from typing import Any

import ray

from bench.variants import Actors, Step
from dagrl.executors.eager import INLINE_BYTES as PUT_BYTES
from dagrl.executors.memory import copied_bytes
from dagrl.executors.packet import payload_bytes

INLINE_BYTES = 100 << 10
REPLAYS = 20


def counted(step: Step, value: Any, actors: Actors) -> int:
    """Bytes a step of phases of dagrl under the compiled executor, by the counters of all its processes."""
    before = _total(actors)
    with step.awake():
        for _ in range(REPLAYS):
            step.run(value)
    return round((_total(actors) - before) / REPLAYS)


def computed(variant: str, shape: str, workers: int, value: Any, result: Any) -> int | None:
    """Bytes a step of one of Ray's own ways, on one host; None for what is not one of them."""
    if variant == "dagrl_eager":
        return _eager(shape, workers, value, result)
    given, returned = _serialized(value), _serialized(result)
    inputs, results = {
        "scatter-gather": (1, workers * returned),
        "reduce": (1, workers * returned),
        "chain": (1, workers * given),
        "multiple args": (workers, workers * returned),
    }[shape]
    if variant == "ray_flat_graph":
        return inputs * given + results
    stored = results if (given if shape == "chain" else returned) > INLINE_BYTES else 0
    if variant == "ray_calls_put":
        return inputs * given + stored
    if variant == "ray_calls":
        calls = 1 if shape == "chain" else workers
        return (calls * given if given > INLINE_BYTES else 0) + stored
    return None


def _eager(shape: str, workers: int, value: Any, result: Any) -> int:
    """Of phases under the eager executor, headers of packets left out: a large input is put once for all shards."""
    given, returned = _serialized(value), _serialized(value if shape == "chain" else result)
    results = workers * returned if returned > INLINE_BYTES else 0
    return (given if payload_bytes(value) > PUT_BYTES else 0) + results


def _total(actors: Actors) -> int:
    return copied_bytes() + int(sum(ray.get([actor.copied.remote() for actor in actors.compiled])))


def _serialized(value: Any) -> int:
    """Bytes of a value as Ray writes it."""
    context = ray._private.worker.global_worker.get_serialization_context()
    return int(context.serialize(value).total_bytes)
