"""Tests that need GPUs. `needs_gpus` marks those that need several of them."""

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips a test or a case on hosts with fewer GPUs."""
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
