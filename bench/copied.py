"""Bytes that one step copies into shared memory: counted for dagrl's edges, computed for Ray's calls and graphs.

The counters cover bytes written to rings, mailboxes and links and bytes copied out of them, in the driver and all workers.
Phases under the eager executor are plain calls, so their bytes are computed too. Ray has no such counters; its bytes follow
from what it writes:

- A compiled graph's channel holds one serialized value per writing node, for any number of readers on the host
  (`ray/experimental/channel/shared_memory_channel.py`).
- A call carries arguments and results of up to 100 KiB inside its message (`max_direct_call_object_size`). Larger ones are
  written to the object store once per call. `ray.put` writes a value once, whatever its size.
"""

from __future__ import annotations

from typing import Any

import ray

from dagrl.bench.variants import Actors, Step
from dagrl.runtime.edges.memory import copied_bytes
from dagrl.runtime.edges.packet import payload_bytes
from dagrl.runtime.executors.eager import INLINE_BYTES as PUT_BYTES

INLINE_BYTES = 100 << 10
REPLAYS = 20


def counted(step: Step, value: Any, actors: Actors) -> int:
    """Returns the bytes per step of compiled dagrl phases, from the counters of all processes."""
    before = _total(step, actors)
    with step.awake():
        for _ in range(REPLAYS):
            step.run(value)
    return round((_total(step, actors) - before) / REPLAYS)


def computed(variant: str, shape: str, workers: int, value: Any, result: Any) -> int | None:
    """Returns the bytes per step of a Ray variant or the eager executor on one host; None for other variants."""
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
    """Returns the bytes of an eager step without packet headers: a large input is put once for all shards."""
    given, returned = _serialized(value), _serialized(value if shape == "chain" else result)
    results = workers * returned if returned > INLINE_BYTES else 0
    return (given if payload_bytes(value) > PUT_BYTES else 0) + results


def _total(step: Step, actors: Actors) -> int:
    return copied_bytes() + int(sum(ray.get([actor.copied.remote() for actor in actors.of[step.variant]])))


def _serialized(value: Any) -> int:
    """Returns the size of a value as Ray serializes it."""
    context = ray._private.worker.global_worker.get_serialization_context()
    return int(context.serialize(value).total_bytes)
