"""What computes attention of segments, grouped experts and FP8 products: our own kernels, or Transformer Engine's.

`policy.megatron_cfg.transformer_engine` says whether it is used where it is installed; on Hopper, `auto` takes what was
faster on an H200 (docs/training.md). Imported only where Megatron is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from dagrl.config import PolicyConfig
from dagrl.config.worker_checks import HOPPER, check_engine, engine_version
from dagrl.workers.megatron.attention import CausalAttention, SegmentAttention, segment_attention
from dagrl.workers.megatron.experts import GroupedExperts, GroupsOf, TorchGroups
from dagrl.workers.megatron.float8 import Products, TensorwiseProducts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """What a worker's layers compute with."""

    attend: SegmentAttention
    groups: GroupsOf
    float8: Products

    def give_to(self, model: torch.nn.Module) -> None:
        """Makes the layers of a model compute attention and experts with these."""
        for part in model.modules():
            if isinstance(part, CausalAttention):
                part.attend = self.attend
            elif isinstance(part, GroupedExperts):
                part.groups = self.groups


def choose_kernels(policy: PolicyConfig, device: torch.device) -> Kernels:
    """Returns what the layers of this worker's model compute with.

    Raises ConfigError if the configuration needs Transformer Engine, and this worker cannot use it.
    """
    wanted, settings = policy.megatron_cfg.transformer_engine, policy.megatron_cfg.fp8_cfg
    own = Kernels(segment_attention, TorchGroups, TensorwiseProducts(settings))
    if check_engine(policy, device.type == "cuda"):
        return own
    measured = torch.cuda.get_device_capability(device)[0] == HOPPER
    for_all = wanted == "always" or (wanted == "auto" and measured)
    if not for_all and settings.fp8_recipe != "blockwise":
        return own
    from dagrl.workers.megatron import transformer_engine as engine

    products = engine.EngineProducts(settings)
    if not for_all:
        return Kernels(own.attend, own.groups, products)
    grouped = engine.has_grouped_products(getattr(torch, policy.precision))
    logger.info("Transformer Engine %s computes attention, FP8 products%s", engine_version(), " and experts" * grouped)
    attend = engine.segment_attention if wanted == "always" else engine.faster_attention
    return Kernels(attend, engine.engine_groups if grouped else own.groups, products)
