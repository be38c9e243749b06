"""Imports Transformer Engine before a test module imports Megatron, as workers do."""

from __future__ import annotations

import torch

from dagrl.workers.megatron.cpu import import_engine

if torch.cuda.is_available():
    import_engine()
