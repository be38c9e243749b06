"""dagrl: post-training phases as statically compiled Ray graphs, replayed.

    from dagrl import Batch, Bucket, Input, ParallelLayout, Scheduler, Shard, Value, WorkerGroup, phase

This is the public API. Each name is imported from its room when it is first used, so `import dagrl` needs neither Ray nor
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dagrl.errors import (
        ChannelError,
        CheckpointError,
        ClusterError,
        ConfigError,
        DagrlError,
        DataError,
        DeadlineError,
        GraphError,
        LayoutError,
        MissingDependencyError,
        PhaseError,
        RefitPlanError,
        RunError,
        UserError,
        WorkerError,
        WorkerFailure,
    )
    from dagrl.refit import Refit
    from dagrl.rl.algorithm import Algorithm
    from dagrl.rl.functions.agents import Endpoint
    from dagrl.rl.functions.episodes import Step
    from dagrl.rl.preferences import Pairs, PreferenceAlgorithm
    from dagrl.rl.token_losses import TokenBatch
    from dagrl.run.worker_protocols import GenerationWorker, RolloutTrainWorker, TrainWorker
    from dagrl.runtime.actors import Resources
    from dagrl.runtime.graph import Arguments, Static
    from dagrl.runtime.layout import ParallelLayout
    from dagrl.runtime.phase import Input, Phase, Shard, Value, join, phase
    from dagrl.runtime.replay import Replay
    from dagrl.runtime.schedule import Scheduler, SchedulerOptions
    from dagrl.runtime.shapes import Batch, Bucket, Field
    from dagrl.runtime.split import Codec
    from dagrl.runtime.worker import WorkerContext, in_warmup
    from dagrl.runtime.worker_group import WorkerGroup

__all__ = [
    "Algorithm",
    "Arguments",
    "Batch",
    "Bucket",
    "ChannelError",
    "CheckpointError",
    "ClusterError",
    "Codec",
    "ConfigError",
    "DagrlError",
    "DataError",
    "DeadlineError",
    "Endpoint",
    "Field",
    "GenerationWorker",
    "GraphError",
    "Input",
    "LayoutError",
    "MissingDependencyError",
    "Pairs",
    "ParallelLayout",
    "Phase",
    "PhaseError",
    "PreferenceAlgorithm",
    "Refit",
    "RefitPlanError",
    "Replay",
    "Resources",
    "RolloutTrainWorker",
    "RunError",
    "Scheduler",
    "SchedulerOptions",
    "Shard",
    "Static",
    "Step",
    "TokenBatch",
    "TrainWorker",
    "UserError",
    "Value",
    "WorkerContext",
    "WorkerError",
    "WorkerFailure",
    "WorkerGroup",
    "__version__",
    "in_warmup",
    "join",
    "phase",
]

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
    "dagrl.runtime.graph": ("Arguments", "Static"),
    "dagrl.runtime.worker": ("WorkerContext", "in_warmup"),
    "dagrl.runtime.actors": ("Resources",),
    "dagrl.runtime.worker_group": ("WorkerGroup",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'dagrl' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULE_OF.get(name, "dagrl.errors")), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
