"""Chooses what computes attention of segments: FlashAttention 2, or Transformer Engine's.

`policy.megatron_cfg.transformer_engine` says whether it is used where it is installed; on Hopper, `auto` takes what was
faster on an H200 (docs/training.md). Imported only where Megatron is.
"""

from __future__ import annotations

import logging

import torch

from dagrl.config import PolicyConfig
from dagrl.config.kernel_checks import HOPPER, check_engine, engine_version
from dagrl.workers.megatron.attention import SegmentAttention, segment_attention

logger = logging.getLogger(__name__)


def choose_attention(policy: PolicyConfig, device: torch.device) -> SegmentAttention:
    """Chooses the attention of this worker's layers.

    Raises ConfigError if the configuration needs Transformer Engine, and this worker cannot use it.
    """
    choice = policy.megatron_cfg.transformer_engine
    if choice == "never" or check_engine(policy, device.type == "cuda"):
        return segment_attention
    if choice == "auto" and torch.cuda.get_device_capability(device)[0] != HOPPER:  # nothing was measured there
        return segment_attention
    from dagrl.workers.megatron import transformer_engine as engine

    logger.info("Transformer Engine %s computes attention", engine_version())
    return engine.segment_attention if choice == "always" else engine.faster_attention
