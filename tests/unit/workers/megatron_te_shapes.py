"""Like `megatron_shapes.py`, for Megatron-Core's Transformer Engine layers; run by test_megatron_weights.py.

Transformer Engine needs a GPU. Stand-ins for its linear layers and norms have the same weights and names, and compute
nothing. Megatron's own classes (`extensions/transformer_engine.py`) decide their arguments, the grouping of experts, and the
box of the global tensor that each weight is.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any
from unittest.mock import MagicMock

import torch

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.megatron import MegatronModules
from tests.unit.refit.weight_reference import Config, model_config

MODULES = MegatronModules(transformer_engine=True, grouped_experts=True)
CASES: list[tuple[Config, ParallelLayout]] = [
    (model_config("qwen2", tie_word_embeddings=True), ParallelLayout(tp=2, pp=2)),
    (model_config("qwen3_moe"), ParallelLayout(tp=2, dp=2, ep=2, etp=1)),
    (model_config("qwen2_moe"), ParallelLayout(tp=2, dp=2, ep=2)),
    (model_config("deepseek_v3"), ParallelLayout(tp=2, pp=2, vpp=2, ep=2, etp=1)),
    (model_config("deepseek_v3", q_lora_rank=None), ParallelLayout(tp=2, dp=2, ep=2)),
    (model_config("nemotron_h", moe_latent_size=4), ParallelLayout(tp=2, pp=2, ep=2, etp=1)),
]


IN_PYTORCH = (
    *("fp8", "distributed", "attention", "cpu_offload", "permutation", "cross_entropy", "cpp_extensions", "module.base"),
    *("router", "float8_tensor", "tensor", "optimizers"),
)
PARTS = ("common", "pytorch", *(f"pytorch.{name}" for name in IN_PYTORCH))  # that Megatron imports


class Layer(torch.nn.Module):
    """Answers Megatron's query when it writes checkpoints: the layer holds nothing in FP8."""

    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


class Linear(Layer):
    """`weight` [out, in], the layer's tensor-parallel shard; optional `bias`."""

    def __init__(
        self, in_features: int, out_features: int, *, tp_size: int, parallel_mode: str | None, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        self.parallel_mode, self.use_bias = parallel_mode, bias
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        for name in self.weight_names():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(rows, columns)))
        self.bias = torch.nn.Parameter(torch.empty(rows)) if bias else None

    def weight_names(self) -> list[str]:
        return ["weight"]


class LayerNormLinear(Linear):
    """A linear layer with a norm over all inputs before it."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(in_features))


class GroupedLinear(Linear):
    """One numbered weight per expert."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **options)

    def weight_names(self) -> list[str]:
        return [f"weight{number}" for number in range(self.num_gemms)]


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))


class NoAttention(torch.nn.Module):
    """Has no weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def stand_in_for_transformer_engine() -> None:
    """Installs the stand-ins. Must run before Megatron's first import, which looks for Transformer Engine."""
    engine = MagicMock(__version__="2.9.0", __spec__=None)
    for stand_in in (Linear, LayerNormLinear, GroupedLinear, RMSNorm):
        setattr(engine.pytorch, stand_in.__name__, stand_in)
    engine.pytorch.DotProductAttention = NoAttention
    engine.pytorch.cpu_offload.get_cpu_offload_context = lambda *_, **__: (None, None)
    engine.pytorch.distributed.CudaRNGStatesTracker = object  # Megatron derives from this, and from the next
    engine.common.recipe.DelayedScaling = object
    sys.modules["transformer_engine"] = engine
    for part in PARTS:
        sys.modules[f"transformer_engine.{part}"] = attrgetter(part)(engine)


def main() -> None:
    stand_in_for_transformer_engine()
    from tests.unit.workers import megatron_shapes

    megatron_shapes.check_all(CASES, MODULES)


if __name__ == "__main__":
    main()
