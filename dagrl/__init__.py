"""dagrl: post-training phases as statically compiled Ray graphs, replayed.

    from dagrl import Batch, Bucket, Input, ParallelLayout, Scheduler, Shard, Value, WorkerGroup, phase

This is the public API. Each name but the errors is imported from its room when it is first used, so `import dagrl` needs
neither Ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dagrl.errors import (
    ChannelError as ChannelError,
    CheckpointError as CheckpointError,
    ClusterError as ClusterError,
    ConfigError as ConfigError,
    DagrlError as DagrlError,
    DataError as DataError,
    DeadlineError as DeadlineError,
    GraphError as GraphError,
    LayoutError as LayoutError,
    MissingDependencyError as MissingDependencyError,
    PhaseError as PhaseError,
    RefitPlanError as RefitPlanError,
    RunError as RunError,
    UserError as UserError,
    WorkerError as WorkerError,
    WorkerFailure as WorkerFailure,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dagrl.refit import Refit as Refit
    from dagrl.rl.algorithm import Algorithm as Algorithm
    from dagrl.rl.functions.agents import Endpoint as Endpoint
    from dagrl.rl.functions.episodes import Step as Step
    from dagrl.rl.preferences import Pairs as Pairs, PreferenceAlgorithm as PreferenceAlgorithm
    from dagrl.rl.token_losses import TokenBatch as TokenBatch
    from dagrl.run.worker_protocols import (
        GenerationWorker as GenerationWorker,
        RolloutTrainWorker as RolloutTrainWorker,
        TrainWorker as TrainWorker,
    )
    from dagrl.runtime.actors import Resources as Resources
    from dagrl.runtime.graph import Arguments as Arguments
    from dagrl.runtime.layout import ParallelLayout as ParallelLayout
    from dagrl.runtime.phase import (
        Input as Input,
        Phase as Phase,
        Shard as Shard,
        Value as Value,
        join as join,
        phase as phase,
    )
    from dagrl.runtime.replay import Replay as Replay
    from dagrl.runtime.schedule import Scheduler as Scheduler, SchedulerOptions as SchedulerOptions
    from dagrl.runtime.shapes import Batch as Batch, Bucket as Bucket, Field as Field
    from dagrl.runtime.split import Codec as Codec
    from dagrl.runtime.worker import WorkerContext as WorkerContext, in_warmup as in_warmup
    from dagrl.runtime.worker_group import WorkerGroup as WorkerGroup

_MODULES = {
    "dagrl.refit": ("Refit",),
    "dagrl.rl.algorithm": ("Algorithm",),
    "dagrl.rl.functions.agents": ("Endpoint",),
    "dagrl.rl.functions.episodes": ("Step",),
    "dagrl.rl.preferences": ("Pairs", "PreferenceAlgorithm"),
    "dagrl.rl.token_losses": ("TokenBatch",),
    "dagrl.run.worker_protocols": ("GenerationWorker", "RolloutTrainWorker", "TrainWorker"),
    "dagrl.runtime.split": ("Codec",),
    "dagrl.runtime.layout": ("ParallelLayout",),
    "dagrl.runtime.phase": ("Input", "Phase", "Shard", "Value", "join", "phase"),
    "dagrl.runtime.replay": ("Replay",),
    "dagrl.runtime.schedule": ("Scheduler", "SchedulerOptions"),
    "dagrl.runtime.shapes": ("Batch", "Bucket", "Field"),
    "dagrl.runtime.graph": ("Arguments",),
    "dagrl.runtime.worker": ("WorkerContext", "in_warmup"),
    "dagrl.runtime.actors": ("Resources",),
    "dagrl.runtime.worker_group": ("WorkerGroup",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted({*_MODULE_OF, *(name for name in globals() if name.endswith(("Error", "Failure")))})


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dagrl' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
