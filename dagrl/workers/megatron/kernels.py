"""Chooses what computes attention of segments and FP8 products: our own kernels, or Transformer Engine's.

`policy.megatron_cfg.transformer_engine` says whether it is used where it is installed; on Hopper, `auto` takes what was
faster on an H200 (docs/training.md). Imported only where Megatron is.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from dagrl.config import PolicyConfig
from dagrl.config.kernel_checks import HOPPER, check_engine, engine_version
from dagrl.workers.megatron.attention import SegmentAttention, segment_attention
from dagrl.workers.megatron.float8 import Products, TensorwiseProducts

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """Implementations of attention and FP8 products for a worker's layers."""

    attend: SegmentAttention
    float8: Products


def choose_kernels(policy: PolicyConfig, device: torch.device) -> Kernels:
    """Chooses the kernels of this worker's layers.

    Raises ConfigError if the configuration needs Transformer Engine, and this worker cannot use it.
    """
    choice, settings = policy.megatron_cfg.transformer_engine, policy.megatron_cfg.fp8_cfg
    own = Kernels(segment_attention, TensorwiseProducts(settings))
    if check_engine(policy, device.type == "cuda"):
        return own
    measured = torch.cuda.get_device_capability(device)[0] == HOPPER
    for_all = choice == "always" or (choice == "auto" and measured)
    if not for_all and settings.fp8_recipe != "blockwise":
        return own
    from dagrl.workers.megatron import transformer_engine as engine

    products = engine.EngineProducts(settings)
    if not for_all:
        return Kernels(own.attend, products)
    logger.info("Transformer Engine %s computes attention and FP8 products", engine_version())
    return Kernels(engine.segment_attention if choice == "always" else engine.faster_attention, products)
