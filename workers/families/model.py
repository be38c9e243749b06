"""A model's `config.json` as the rules of a family read it, and what a family is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagrl.config import Json
from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice
from workers.families.keys import check_query_groups, with_defaults

if TYPE_CHECKING:
    from workers.families.megatron import MegatronRank
    from workers.families.vllm import VllmRank


class Model:
    """Typed access to a `config.json`. What it lacks, and has no default, is a ConfigError that names the key."""

    def __init__(self, hf_config: Mapping[str, Json]) -> None:
        self.config = with_defaults(hf_config)

    def size(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number, `least` or more."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"the model's config.json has {key} = {value!r}; expected a whole number")
        if value < least:
            raise ConfigError(f"the model's config.json has {key} = {value}; expected a number of at least {least}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch."""
        value = self.config.get(key)
        return default if value is None else bool(value)

    def text(self, key: str, default: str = "") -> str:
        """A word."""
        value = self.config.get(key)
        return default if value is None else str(value)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.config.get(key) is not None

    @property
    def type(self) -> str:
        return self.text("model_type")

    @property
    def layers(self) -> int:
        """Hybrids may count them by naming the kind of each."""
        kinds = self.config.get("layers_block_type")
        return len(kinds) if isinstance(kinds, list) else self.size("num_hidden_layers", least=1)

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", least=1)

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads", least=1)

    @property
    def kv_heads(self) -> int:
        count = self.size("num_key_value_heads", self.heads, least=1)
        check_query_groups(self.heads, count)
        return count

    @property
    def head_dim(self) -> int:
        return self.size("head_dim", self.hidden // self.heads, least=1)

    @property
    def ffn(self) -> int:
        return self.size("intermediate_size", least=1)

    @property
    def vocabulary(self) -> int:
        return self.size("vocab_size", least=1)

    @property
    def tied(self) -> bool:
        return self.flag("tie_word_embeddings")

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head."""
        return self.type.startswith("qwen3")

    @property
    def qkv_bias(self) -> bool:
        """Query, key and value projections have a bias."""
        return self.type.startswith("qwen2") or self.flag("attention_bias")


@dataclass(frozen=True)
class Names:
    """What a family calls the parts outside its layers: in Hugging Face's checkpoints, in Megatron and in vLLM."""

    embedding: str = "model.embed_tokens.weight"
    layer: str = "model.layers"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    megatron_norm: str = "final_layernorm"
    vllm_embedding: str = "model.embed_tokens.weight"
    vllm_layer: str = "model.layers"
    vllm_norm: str = "model.norm.weight"


@dataclass(frozen=True)
class Derived:
    """A tensor that vLLM computes from others after a load, to be recomputed after each refit: `rule` says how.

    `tensors` are the names, in vLLM's module at `module`, of what is recomputed.
    """

    rule: str
    module: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """The rules of one family. Layer rules yield the slices of one layer, given the prefixes of its names."""

    name: str
    model_types: tuple[str, ...]
    megatron_layer: Callable[[Model, MegatronRank, int, str, str], Iterator[WeightSlice]]
    vllm_layer: Callable[[Model, VllmRank, int, str, str], Iterator[WeightSlice]]
    names: Names = Names()
    derived: Callable[[Model, int, str], Iterator[Derived]] = lambda model, layer, prefix: iter(())
