"""The two sides of a refit benchmark: Megatron-Core's modules and vLLM's, of real size, on the GPUs of their ranks.

Where there is no GPU, or vLLM cannot build a model, tensors of exactly the described shapes stand in, which the results say.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.refit_cases import Case
from bench.refit_truth import described
from dagrl.config import PolicyConfig
from dagrl.layout import ParallelLayout
from dagrl.refit.slices import STACKED, WeightSlice, numbered
from dagrl.worker import WorkerContext
from workers.vllm.weights import local_name

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass
class Side:
    """What one rank holds: tensors by the names in `slices`, whose they are, and the model if it is vLLM's."""

    slices: Sequence[WeightSlice]
    tensors: Mapping[str, torch.Tensor]
    holder: str
    model: Any = None


def described_side(slices: Sequence[WeightSlice], device: torch.device, holder: str) -> Side:
    """Tensors of the described shapes alone."""
    return Side(slices, described(slices, device), holder)


def megatron_side(case: Case, rank: int, address: str, device: torch.device) -> Side:
    """This train rank's Megatron-Core modules; the train ranks meet at `address` and part again."""
    return modules_side(case.sources()[rank], megatron_model(case, case.train, rank, address, device))


def modules_side(slices: Sequence[WeightSlice], model: Any) -> Side:
    """The parameters of `model`, made by `megatron_model`, that `slices` speak of."""
    return Side(slices, named_tensors(slices, model.parameters()), "Megatron-Core modules")


def megatron_model(case: Case, layout: ParallelLayout, rank: int, address: str, device: torch.device) -> Any:
    """What rank `rank` of `layout` has of the model. The ranks of the layout meet at `address`, and have parted again."""
    from workers.megatron import cpu, groups
    from workers.megatron.architecture import read_architecture
    from workers.megatron.model import build_model

    cpu.adapt()
    policy = PolicyConfig(model_name=case.model, precision="bfloat16")
    groups.start_groups(WorkerContext("train", rank, layout), address, 0)
    try:
        return build_model(read_architecture(case.config), policy, layout, device)
    finally:
        groups.end_groups()


def vllm_side(case: Case, rank: int, device: torch.device) -> Side:
    """This generation rank's vLLM modules, their parameters as vLLM's own loader fills them."""
    slices = case.destinations()[rank]
    try:
        model = _vllm_model(case, rank, device)
        parameters = {local_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
        return Side(slices, named_tensors(slices, parameters), "vLLM modules", model)
    except Exception:
        reason = traceback.format_exc().strip().splitlines()[-1]
        return described_side(slices, device, f"tensors of vLLM's shapes (its modules: {reason})")


def _vllm_model(case: Case, rank: int, device: torch.device) -> Any:
    """Each rank builds its own model: sizes and rank are set on vLLM's groups, which nothing uses while a model is built."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    directory = Path(tempfile.mkdtemp())
    changes: dict[str, Any] = {"quantization_config": _fp8(case)} if case.fp8 else {}
    (directory / "config.json").write_text(json.dumps({**case.config, **changes, "dtype": "bfloat16"}))
    arguments = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024}
    config = EngineArgs(
        model=str(directory), enable_expert_parallel=case.expert_parallel, **arguments
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{directory}/store", device.index, "nccl")
        parallel_state.destroy_model_parallel()  # of a model before: only one with experts has a group for them
        parallel_state.initialize_model_parallel(1, 1)
        groups = [parallel_state.get_tp_group()]
        if "num_experts" in case.config:
            groups.append(parallel_state.get_ep_group())
        for group in groups:
            group.world_size, group.rank_in_group, group.ranks = case.tp, rank, list(range(case.tp))
        config.parallel_config.tensor_parallel_size = case.tp
        with set_default_torch_dtype(torch.bfloat16), device:
            return initialize_model(config)


def leave_vllm() -> None:
    """Leave the process group that vLLM's modules were built in, if there is one."""
    if torch.distributed.is_initialized():
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _fp8(case: Case) -> dict[str, Any]:
    """What the `config.json` of a checkpoint in blockwise FP8 says; routers stay as they are."""
    layers = case.config["num_hidden_layers"] if "num_experts" in case.config else 0
    assert isinstance(layers, int)
    kept = {"modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(layers)]} if layers else {}
    return {**_FP8, **kept}


def named_tensors(slices: Sequence[WeightSlice], parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that `slices` speak of; the rest is let go."""
    names: dict[str, None] = {}
    for held in slices:
        tensors = [held.tensor] if held.scales is None else [held.tensor, held.scales.tensor]
        for tensor in tensors:
            stack = range(*held.local[0]) if STACKED in tensor else ()
            names.update(dict.fromkeys([numbered(tensor, number) for number in stack] or [tensor]))
    missing = sorted(names.keys() - parameters.keys())
    if missing:
        raise KeyError(f"the modules lack {missing[:4]}; they have {sorted(parameters)[:8]}")
    return {name: parameters[name] for name in names}
