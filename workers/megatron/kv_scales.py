"""Scales of generation's KV cache in FP8, calibrated on the train workers: the largest key and value of a batch over 448.

Keys are seen as the cache stores them, after their norm and rotation. A batch is run forward under the current weights, the
largest magnitude of each layer is taken over its tokens and heads, and then over all workers, so that every rank of an
engine has the same scales. vLLM divides by them before it rounds to e4m3, whose largest value is 448. Imported only where
Megatron is.
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

from dagrl.layout import Coordinates, ParallelLayout
from dagrl.refit.quantize import LARGEST
from dagrl.shapes import Batch
from workers.families.kv_scales import KINDS, megatron_attention


def without_padding(batch: Batch) -> Batch:
    """The batch with every row filled up by repeating its own tokens, and rows of padding alone by those of the first."""
    lengths = batch["lengths"].astype(np.int64)
    rows = np.where(lengths > 0, np.arange(len(lengths)), int(np.argmax(lengths > 0)))
    columns = np.arange(batch.tokens)[None, :] % np.maximum(lengths[rows], 1)[:, None]
    return batch.with_fields(tokens=batch["tokens"][rows[:, None], columns], lengths=np.full_like(lengths, batch.tokens))


class KvScales:
    """One rank's scales, `tensors` by local name, float32 [1] each; 1 before the first calibration, as in vLLM."""

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
    def calibrating(self, margin: float) -> Iterator[None]:
        """Forward passes in the block are looked at; at its end, all workers together, the scales are `margin` times theirs.

        Layers that saw nothing but zeros keep a scale of 1.
        """
        self._peaks.zero_()
        hooks = [module.register_forward_pre_hook(partial(self._look, layer)) for layer, module in self._attention.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        dist.all_reduce(self._peaks, dist.ReduceOp.MAX)
        scales = torch.where(self._peaks > 0, self._peaks * margin / LARGEST, 1.0)
        for name, (layer, _) in self._attention.items():
            for column, kind in enumerate(KINDS):
                self.tensors[f"{name}.{kind}_scale"].copy_(scales[layer, column : column + 1])

    def largest(self) -> dict[str, float]:
        """The largest scale of the keys, and of the values, of this rank's layers."""
        return {
            kind: max(float(tensor) for name, tensor in self.tensors.items() if name.endswith(f".{kind}_scale"))
            for kind in KINDS
        }

    def _look(self, layer: int, module: Any, arguments: tuple[Tensor, ...]) -> None:
        """Before an attention module runs on `(query, key, value, ...)`."""
        for column, tensor in enumerate(arguments[1:3]):
            peak = tensor.detach().abs().amax().float()
            torch.maximum(self._peaks[layer, column], peak, out=self._peaks[layer, column])
