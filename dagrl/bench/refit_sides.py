"""The two sides of a refit benchmark: full-size Megatron-Core and vLLM modules on their ranks' GPUs.

Without a GPU, or if vLLM cannot build a model, tensors of the described shapes replace the modules; the results say so.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.refit_truth import described
from dagrl.config import PolicyConfig
from dagrl.refit.slices import WeightSlice, expand
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.megatron import cpu, groups
from dagrl.workers.megatron.architecture import read_architecture
from dagrl.workers.vllm.described import build
from dagrl.workers.vllm.quantization import block_fp8


@dataclass
class Side:
    """One rank's tensors, by the names in `slices`, who holds them, and model and configuration if they are vLLM's."""

    slices: Sequence[WeightSlice]
    tensors: Mapping[str, torch.Tensor]
    holder: str
    model: Any = None
    config: Any = None


def modules_side(slices: Sequence[WeightSlice], model: Any) -> Side:
    """Returns the parameters of `model`, from `megatron_model`, that `slices` name."""
    return Side(slices, named_tensors(slices, model.parameters()), "Megatron-Core modules")


def megatron_model(case: RefitCase, layout: ParallelLayout, rank: int, address: str, device: torch.device) -> Any:
    """Builds the model of rank `rank` of `layout`. Collective; the ranks meet at `address` and leave their groups
    afterwards."""
    cpu.adapt()
    from dagrl.workers.megatron.model import build_model

    policy = PolicyConfig(model_name=case.model, precision="bfloat16")
    groups.start_groups(WorkerContext("train", rank, layout), address, 0)
    try:
        return build_model(read_architecture(case.config), policy, layout, device)
    finally:
        groups.end_groups()


def vllm_side(case: RefitCase, rank: int, slices: Sequence[WeightSlice], device: torch.device) -> Side:
    """Returns this generation rank's vLLM modules, with the parameters that vLLM's own loader fills."""
    try:
        model, config = _vllm_model(case, rank, device)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return Side(slices, named_tensors(slices, parameters), "vLLM modules", model, config)
    except Exception:
        reason = traceback.format_exc().strip().splitlines()[-1]
        return Side(slices, described(slices, device), f"tensors of vLLM's shapes (its modules: {reason})")


def _vllm_model(case: RefitCase, rank: int, device: torch.device) -> tuple[Any, Any]:
    """Builds one rank's model alone, and returns it with its configuration."""
    directory = Path(tempfile.mkdtemp())
    changes: dict[str, Any] = (
        {"quantization_config": block_fp8(cast(int, case.config["num_hidden_layers"]))} if case.fp8 else {}
    )
    (directory / "config.json").write_text(json.dumps({**case.config, **changes, "dtype": "bfloat16"}))
    options = {"max_model_len": 1024, "enable_expert_parallel": case.expert_parallel}
    return build(directory, case.tp, rank, torch.bfloat16, device, **options)


def named_tensors(slices: Sequence[WeightSlice], parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors that `slices` name. Raises KeyError if the modules lack one."""
    names = dict.fromkeys(held.tensor for one in expand(slices) for held in (one, one.scales) if held is not None)
    missing = sorted(names.keys() - parameters.keys())
    if missing:
        raise KeyError(f"the modules lack {missing[:4]}; they have {sorted(parameters)[:8]}")
    return {name: parameters[name] for name in names}
