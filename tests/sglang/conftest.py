"""Imports SGLang before the tests do. Without it nothing here is collected."""

from __future__ import annotations

import importlib.util
import os

import torch

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
torch.set_num_threads(1)  # forks do not inherit the threads

if not collect_ignore_glob:
    # torchvision's wheel is built for CUDA, and cannot load its operators next to a torch for CPUs.
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    import sglang.srt.models.qwen3  # noqa: F401
