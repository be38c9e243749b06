"""What a refit writes in an engine, and what runs after it, with a layer that packs its weight as vLLM's do on CPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dagrl.refit.recording import named_tensors, record
from dagrl.refit.slices import expand
from dagrl.workers.vllm.destinations import find_destinations
from dagrl.workers.vllm.loader import LoadedModel, LoadedParameter


class Packing:
    """A quantization method that keeps a packed copy and drops the weight."""

    @staticmethod
    def process_weights_after_loading(layer: Any) -> None:
        if layer.weight.ndim != 2:
            return
        layer.packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda states: states @ layer.packed.T
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Engine(torch.nn.Module):
    """One layer, whose loader puts even rows of the checkpoint's parameter first: a value that it computes (Falcon)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.nn.Linear(3, 8, bias=False)
        self.layer.quant_method = Packing

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self.layer.weight.data.copy_(torch.cat([weight[::2], weight[1::2]]))


def test_a_computed_weight_is_packed_again_after_a_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        "vllm.config": SimpleNamespace(set_current_vllm_config=lambda _: nullcontext()),
        "vllm.model_executor.layers.attention": SimpleNamespace(MLAAttention=()),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    first, second = torch.rand(2, 8, 3)
    engine = Engine()
    engine.load_weights([("w", first)])
    held = {name: LoadedParameter(tensor, tensor.flatten().clone()) for name, tensor in named_tensors(engine).items()}
    loaded = LoadedModel(held, record(engine, [("w", (8, 3), torch.float32)], torch.float32))
    Packing.process_weights_after_loading(engine.layer)
    settings = SimpleNamespace(
        quant_config=None, parallel_config=SimpleNamespace(), model_config=SimpleNamespace(dtype=torch.float32)
    )
    destinations = find_destinations(engine, loaded, settings)
    for piece in expand(destinations.slices):
        target = destinations.tensors[piece.tensor][tuple(slice(*extent) for extent in piece.local)]
        target.copy_(second[tuple(slice(*extent) for extent in piece.box)].reshape(target.shape))
    for hook in destinations.hooks:
        hook()
    assert torch.equal(engine.layer.cpu_linear(torch.eye(3)).T, torch.cat([second[::2], second[1::2]]))
