"""SchedulerOptions: how a scheduler compiles phases, and its deadlines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagrl.runtime.compile import Engine
from dagrl.runtime.executors.base import GraphLimits


@dataclass(frozen=True)
class SchedulerOptions:
    """How phases are compiled and how long anything may take; engine and deadlines are those of the configuration.

    `engine`: compiled graphs run on dagrl's loop and channels, or on Ray's own. `fuse_shards`: data-parallel shards on the
    same hosts share one graph, instead of one graph each. `max_in_flight`: replays of a phase under way at once.
    `overlap_communication`: graphs with accelerator edges overlap their transfers with computation.
    `hang_factor`, `hang_floor_s`: a worker hangs if it runs a replay for that multiple of the longest one of its phase so
    far, and at least that long, or does not answer for as long. None: only the deadline `replay_s` counts.
    """

    executor: Literal["compiled", "eager"] = "compiled"
    engine: Engine = "dagrl"
    fallback: Literal["eager", "error"] = "eager"
    fuse_shards: bool = False
    max_in_flight: int = 2
    overlap_communication: bool = False
    arity: int = 8
    result_bytes: int = 1 << 20
    compile_s: float = 60.0
    warmup_s: float = 180.0
    replay_s: float = 120.0
    hang_factor: float | None = None
    hang_floor_s: float = 10.0
    grace_s: float = 30.0
    teardown_s: float = 8.0

    def limits(
        self, phase: str, input_bytes: int, result_bytes: int | None, max_in_flight: int | None, room_key: str
    ) -> GraphLimits:
        """Returns the limits of a phase's graphs; `room_key` says how the caller's own users set both sizes."""
        own_key = f"result_bytes of Scheduler.add({phase})"
        result_key = own_key if result_bytes else f"{GraphLimits.result_key}, or {own_key},"
        return GraphLimits(
            input_bytes=input_bytes,
            result_bytes=result_bytes or self.result_bytes,
            max_in_flight=max_in_flight or self.max_in_flight,
            compile_s=self.compile_s,
            replay_s=self.replay_s,
            teardown_s=self.teardown_s,
            overlap_communication=self.overlap_communication,
            input_key=room_key or f"input_bytes of Scheduler.add({phase}), or add a larger bucket",
            result_key=room_key or result_key,
        )
