"""A reference policy with a model of its own: another size or family than the policy's, such as a teacher.

It has the policy's layout and process groups, and its weights stay in host memory between uses unless
`policy.reference_weights` is `device`. Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dagrl.config import PolicyConfig
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.megatron.architecture import read_architecture
from dagrl.workers.megatron.hf_load import load_hf, read_hf_config
from dagrl.workers.megatron.model import ModelChunks, build_model
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes


class ReferenceModel:
    """This rank's part of the model in `directory`, loaded once."""

    def __init__(self, directory: Path, policy: PolicyConfig, context: WorkerContext, device: torch.device) -> None:
        hf_config = read_hf_config(directory)
        self._device, self._swaps = device, policy.reference_weights == "host" and device.type != "cpu"
        self._model = build_model(read_architecture(hf_config), policy, context.layout, device)
        slices = megatron_weight_slices(hf_config, context.layout, context.rank)
        load_hf(directory, slices, parameter_shapes(hf_config), self._model.tensors())
        self._host = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
            for name, tensor in (self._model.tensors() if self._swaps else {}).items()
        }
        self._to_host()

    @contextmanager
    def on_device(self) -> Iterator[ModelChunks]:
        """Context in which the weights are on the device. Gives the model."""
        weights = self._model.weights()
        for name, tensor in self._host.items():
            weights[name].data = tensor.to(self._device, non_blocking=True)
        try:
            yield self._model
        finally:
            self._to_host()

    def _to_host(self) -> None:
        """Frees the device memory of the weights, which never change."""
        weights = self._model.weights()
        for name, tensor in self._host.items():
            weights[name].data = tensor
