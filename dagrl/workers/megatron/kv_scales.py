"""Scales of generation's FP8 KV cache, calibrated on the train workers: the largest key and value of a batch over 448.

A batch is run forward under the current weights. Keys are measured as the cache stores them, after norm and rotation. Each
layer's largest magnitude is taken over tokens and heads, then over all workers, so all ranks of an engine have equal scales.
vLLM divides by them before rounding to e4m3, whose largest value is 448. Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.refit.fp8 import LARGEST
from dagrl.runtime.layout import Coordinates, ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.workers.families.kv_scales import KINDS, megatron_attention


def without_padding(batch: Batch) -> Batch:
    """Fills every row by repeating its own tokens. Padding rows repeat the first non-empty row."""
    lengths = batch["lengths"].astype(np.int64)
    rows = np.where(lengths > 0, np.arange(len(lengths)), int(np.argmax(lengths > 0)))
    columns = np.arange(batch.tokens)[None, :] % np.maximum(lengths[rows], 1)[:, None]
    return batch.with_fields(tokens=batch["tokens"][rows[:, None], columns], lengths=np.full_like(lengths, batch.tokens))


class KvScales:
    """One rank's scales: `tensors` by local name, float32 [1] each. 1 before the first calibration, as in vLLM."""

    def __init__(
        self, chunks: Sequence[Any], layers: int, layout: ParallelLayout, at: Coordinates, device: torch.device
    ) -> None:
        self._peaks = torch.zeros(layers, len(KINDS), device=device)
        self._attention: dict[str, tuple[int, Any]] = {}  # layer and module, by the module's name
        for stage, chunk in enumerate(chunks):
            for local, layer in enumerate(layout.stage_layers(layers, at.pp, stage)):
                module = chunk.decoder.layers[local].self_attention.core_attention
                self._attention[megatron_attention(layout, stage, local)] = (layer, module)
        self.tensors = {f"{name}.{kind}_scale": torch.ones(1, device=device) for name in self._attention for kind in KINDS}

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Measures the forward passes of the block, then sets the scales to the maximum over all workers.

        Layers that saw only zeros get a scale of 1.
        """
        self._peaks.zero_()
        hooks = [
            module.register_forward_pre_hook(partial(self._measure, layer)) for layer, module in self._attention.values()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        dist.all_reduce(self._peaks, dist.ReduceOp.MAX)
        scales = torch.where(self._peaks > 0, self._peaks / LARGEST, 1.0)
        for name, (layer, _) in self._attention.items():
            for column, kind in enumerate(KINDS):
                self.tensors[f"{name}.{kind}_scale"].copy_(scales[layer, column : column + 1])

    def largest(self) -> dict[str, float]:
        """Returns the largest scale of keys and of values over this rank's layers."""
        return {
            kind: max(float(tensor) for name, tensor in self.tensors.items() if name.endswith(f".{kind}_scale"))
            for kind in KINDS
        }

    def _measure(self, layer: int, module: Any, arguments: tuple[Tensor, ...]) -> None:
        """Measures keys and values: a forward pre-hook of an attention module, called with `(query, key, value, ...)`."""
        for column, tensor in enumerate(arguments[1:3]):
            peak = tensor.detach().abs().amax().float()
            torch.maximum(self._peaks[layer, column], peak, out=self._peaks[layer, column])
