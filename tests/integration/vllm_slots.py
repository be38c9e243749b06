"""Compares LoRA slots that a refit has filled with what vLLM's own code makes of adapters; for `vllm_loads`."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernelModularImpl

from dagrl.config import PeftConfig
from dagrl.workers.megatron.weights import stacked_shapes
from dagrl.workers.train.adapters import adapter_names, linear_shapes, targets
from dagrl.workers.vllm.lora import find_slots
from tests.families import Hf
from tests.unit.refit.weight_reference import VllmRank

PEFT = PeftConfig(enabled=True, refit="adapters", dim=4)


def check_slots(model: torch.nn.Module, config: Hf, rank: VllmRank) -> int:
    """vLLM fills the slots with the values that a refit writes. Returns the number of slots."""
    layers = with_lora(model, rank)
    found = find_slots(layers, config, PEFT, torch.float32)
    shapes = targets(linear_shapes(stacked_shapes(config)), PEFT)
    adapters = {
        part: torch.randn(sizes)
        for name, (outputs, inputs) in shapes.items()
        for part, sizes in zip(adapter_names(name), ((PEFT.dim, inputs), (outputs, PEFT.dim)), strict=True)
    }
    for piece in found.slices:
        target = found.tensors[piece.tensor][tuple(slice(*part) for part in piece.local)]
        target.copy_(adapters[piece.name][tuple(slice(*part) for part in piece.box)].view(target.shape))
    ours = {name: tensor.clone() for name, tensor in found.tensors.items()}
    loaded = LoRAModel(1, PEFT.dim, dict(read_adapters(adapters)))
    layers._create_merged_loras_inplace(loaded)
    for name, layer in layers.modules.items():
        if lora := loaded.get_lora(name):
            layer.set_lora(0, lora.lora_a, lora.lora_b)
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, ours[name]) and tensor.any(), name
    return len(ours)


def with_lora(model: torch.nn.Module, rank: VllmRank) -> Any:
    """Wraps the model's layers as vLLM does, without kernels for experts. Returns vLLM's manager of them."""
    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), FusedMoEMethodBase):
            experts = MagicMock(spec=LoRAExpertsMixin, consumes_expert_mask=False)
            impl = MagicMock(spec=FusedMoEKernelModularImpl)
            method.moe_kernel = MagicMock(impl=impl, fused_experts=experts, prepare_finalize=object(), is_monolithic=False)
    settings = LoRAConfig(max_lora_rank=8, max_loras=1, max_cpu_loras=1, lora_dtype=torch.float32)
    vllm_config = VllmConfig()
    vllm_config.parallel_config.enable_expert_parallel = rank.expert_parallel
    with set_current_vllm_config(vllm_config):
        return LoRAModelManager(model, 4, 64, 100, settings, torch.device("cpu"), vllm_config)


def read_adapters(adapters: dict[str, Tensor]) -> Iterator[tuple[str, LoRALayerWeights]]:
    """Yields the adapters as vLLM reads them from files, with a scale of 1."""
    for name, a in adapters.items():
        module, ending, _ = name.partition(".lora_A.weight")
        if not ending:
            continue
        b = adapters[f"{module}.lora_B.weight"]
        yield module, LoRALayerWeights(module, PEFT.dim, PEFT.dim, a, b)
