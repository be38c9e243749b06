"""The definition of a model family: layout rules for Megatron, and names outside the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dagrl.refit.slices import WeightSlice
from dagrl.workers.families.hf_config import ModelConfig
from dagrl.workers.families.megatron import MegatronRank


@dataclass(frozen=True)
class ParameterNames:
    """Names of embedding, layers, final norm and head: in Hugging Face checkpoints, and of the norm in Megatron."""

    embedding: str = "model.embed_tokens.weight"
    layer: str = "model.layers"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    megatron_norm: str = "final_layernorm"

    def in_vllm(self, name: str) -> str:
        """Returns vLLM's name of a module or parameter outside fused ones."""
        root = self.layer.removesuffix("layers")
        name = name.replace(self.embedding, "model.embed_tokens.weight")
        return f"model.{name.removeprefix(root)}" if name.startswith(root) else name


@dataclass(frozen=True)
class Family:
    """The rules of one family. Layer rules yield the slices of one layer, given its name prefixes (HF, local)."""

    name: str
    model_types: tuple[str, ...]
    megatron_layer: Callable[[ModelConfig, MegatronRank, int, str, str], Iterator[WeightSlice]]
    names: ParameterNames = ParameterNames()
