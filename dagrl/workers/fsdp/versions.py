"""Where the supported releases of transformers differ: until 5.20 a plan has patterns of names, later names themselves."""

from typing import Any

from transformers import DistributedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

BY_NAME = hasattr(PreTrainedModel, "_resolve_parallel_plans")

if BY_NAME:
    from transformers.distributed.expert_parallel import apply_expert_parallelism
else:
    from transformers.distributed.tensor_parallel import apply_expert_parallelism, resolve_parallel_plans

__all__ = ["apply_expert_parallelism", "parallel_plans", "plan_key"]


def parallel_plans(model: Any, wanted: DistributedConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the plans for tensor and expert parallelism: a style by `plan_key` of a module or parameter."""
    tensor, expert = model._resolve_parallel_plans(wanted)[:2] if BY_NAME else resolve_parallel_plans(model, wanted)
    return tensor, expert


def plan_key(name: str) -> str:
    """Returns what `parallel_plans` have for the name of a module."""
    return name if BY_NAME else str(replace_layer_number_by_wildcard(name))
