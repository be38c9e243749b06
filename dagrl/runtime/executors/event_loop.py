"""The event loop that Ray gives an actor whose class has `async def` methods: nodes that are coroutines run there."""

from __future__ import annotations

import asyncio
import importlib

from dagrl.errors import RunError


def actor_event_loop(label: str) -> asyncio.AbstractEventLoop:
    """Returns the loop of this actor's default concurrency group, which Ray keeps private. Raises RunError without one."""
    core = importlib.import_module("ray._private.worker").global_worker.core_worker
    if not core.current_actor_is_asyncio():
        raise RunError(
            f"{label} returned a coroutine, but its actor has no event loop: Ray gives one to actors whose class has "
            "an `async def` method. Await it inside the method, or make the method an `async def`"
        )
    constructor = importlib.import_module("ray._raylet").PythonFunctionDescriptor("", "__init__", "")
    loop, _ = core.get_event_loop(constructor, "")
    assert isinstance(loop, asyncio.AbstractEventLoop)
    return loop
