"""What the installed vLLM can do, looked up rather than derived from its version: the one place that knows differences.

Everything else in this package uses what vLLM 0.26 to 0.33 have alike, by the sources of 0.26.0, 0.29.0, 0.32.0 and 0.33.0:
all of them have the engine arguments that we set, and the methods of engine, executor and worker that we call. 0.26 has run
on GPUs, and on CPUs 0.32; so have 0.27, 0.29 and 0.31 with the tests of generation and updates, of which 0.27 fails one: a
log-probability in float32 is 1.02e-5 from transformers', not 1e-5. 0.33 was only read. They differ in:

- `wake_up` tells whether all memory is back in 0.32, and returns nothing in 0.29: nobody here asks;
- expert tensors lie in `experts.routed_experts` since 0.25 (`workers.vllm.weights.local_name`);
- weight versions of vLLM's own (`set_weight_version`) are in 0.29, not in 0.26: ours are counted beside the engine instead;
- an executor's `shutdown` leaves vLLM's own process groups since 0.33; ours end with the process;
- the second model runner serves some architectures in 0.26, and in 0.32 all of them where there is Triton; requests, outputs
  and weights are the same under both;
- the CPU build has every field of `EngineArgs`, but neither sleep mode, CUDA graphs nor asynchronous scheduling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagrl.errors import MissingDependencyError

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput

SLEEP_TAGS = ("weights", "kv_cache")
"""What a sleeping engine has given up, and may be given back one at a time."""


def engine_config(arguments: Mapping[str, Any]) -> VllmConfig:
    """vLLM's whole configuration from `EngineArgs` by name. Raises MissingDependencyError for a vLLM that lacks one."""
    from vllm import EngineArgs, __version__

    lacking = sorted(arguments.keys() - {field.name for field in dataclasses.fields(EngineArgs)})
    if lacking:
        raise MissingDependencyError(
            f"vLLM {__version__} lacks the engine arguments {', '.join(lacking)}; install vLLM 0.26 to 0.33 "
            "(dagrl[vllm]), or correct policy.generation.vllm_kwargs"
        )
    return EngineArgs(**arguments).create_engine_config()


def can_sleep() -> bool:
    """Whether engines on this platform can give up their memory and take it back at the same addresses."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available() and current_platform.is_cumem_allocator_available())


def come_to_rest(engine: LLMEngine) -> list[RequestOutput]:
    """Wait for the steps that are in flight, and start none: what they gave out. Without asynchronous scheduling none is.

    Paused, the scheduler hands out empty batches, and each step takes the oldest batch from the queue.
    """
    core = engine.engine_core.engine_core
    outputs: list[RequestOutput] = []
    if core.batch_queue:
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            outputs += engine.step()
        core.resume_scheduler()
    return outputs
