"""A loss and an advantage of your own, in one file. From its directory:

dagrl train grpo_quickstart.yaml loss_fn.name=own_loss:soft_clip loss_fn.args.width=0.2 advantage.name=own_loss:rank
"""

import numpy as np
import torch
from torch import Tensor

from dagrl import TokenBatch


def soft_clip(batch: TokenBatch, *, width: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """A surrogate whose ratio is bounded smoothly: 1 + width tanh((r - 1) / width). All tensors are [b, t]."""
    ratio = torch.exp(batch.log_ratio)
    bounded = 1 + width * torch.tanh((ratio - 1) / width)
    return -batch.advantages * bounded, {"own/bounded_ratio": bounded}


def rank(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The rank of each completion in its group, from -1 to 1. Both arrays are [prompts, completions]."""
    above = rewards[:, :, None] - rewards[:, None, :]
    both = valid[:, :, None] & valid[:, None, :]
    return (np.sign(above) * both).sum(axis=2) / np.maximum(valid.sum(axis=1, keepdims=True) - 1, 1)
