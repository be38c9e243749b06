"""Where the weights of a Hugging Face model lie in vLLM's tensors on one tensor-parallel rank. Pure functions.

Layout rules and their sources in vLLM (unchanged over 0.26 to 0.33): `QKVParallelLinear` holds `[Q; K; V]` of the rank's
heads, and one key/value head on several ranks where there are fewer of them than ranks; `MergedColumnParallelLinear` holds
`[gate; up]` of the rank's rows; `RowParallelLinear` a range of columns (model_executor/layers/linear.py);
`VocabParallelEmbedding` pads the vocabulary to 64 and then divides it (vocab_parallel_embedding.py); fused experts are
`w13_weight [E, 2I, H]`, gate first, and `w2_weight [E, H, I]`, divided like dense MLPs (fused_moe/layer.py).
Local tensor names are vLLM's parameter names; see `local_name` for the one that differs between versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dagrl.errors import ConfigError, LayoutError
from dagrl.refit.slices import Box, WeightSlice

VOCABULARY_PADDING = 64
_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def vllm_weight_slices(hf_config: Mapping[str, Any], tp_size: int, tp_rank: int) -> list[WeightSlice]:
    """Every weight that rank `tp_rank` of `tp_size` holds, of a dense Llama, Qwen2, Qwen3 or a Qwen3-MoE model.

    `hf_config` is the content of `config.json`. Tied embeddings are one tensor, described once. Raises ConfigError for
    other model types, LayoutError when the sizes do not divide.
    """
    if hf_config.get("model_type") not in _MODEL_TYPES:
        raise ConfigError(
            f"model type {hf_config.get('model_type')!r} has no vLLM weight layout here; known: {_MODEL_TYPES}"
        )
    return list(_model(_Model(hf_config, tp_size, tp_rank)))


def local_name(parameter: str) -> str:
    """The name used here for a vLLM parameter: expert tensors have lain in `experts.routed_experts` since vLLM 0.25."""
    return parameter.replace(".experts.routed_experts.", ".experts.")


@dataclass(frozen=True)
class _Model:
    """Sizes of the model, and the rank that asks."""

    config: Mapping[str, Any]
    tp: int
    rank: int

    def size(self, key: str) -> int:
        return int(self.config[key])

    def flag(self, key: str) -> bool:
        return bool(self.config.get(key, False))

    @property
    def type(self) -> str:
        return str(self.config["model_type"])

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.hidden // self.size("num_attention_heads"))

    @property
    def key_value_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.size("num_attention_heads"))

    @property
    def experts(self) -> int:
        """Transformers 5 writes `num_local_experts`, earlier versions and the published checkpoints `num_experts`."""
        return self.size("num_experts" if "num_experts" in self.config else "num_local_experts")

    def part(self, size: int, what: str) -> tuple[int, int]:
        """This rank's range of `size` things."""
        if size % self.tp:
            raise LayoutError(f"tensor parallel size {self.tp} does not divide {what} ({size}); choose one that does")
        each = size // self.tp
        return self.rank * each, (self.rank + 1) * each

    def is_moe(self, layer: int) -> bool:
        if self.type != "qwen3_moe" or layer in self.config.get("mlp_only_layers", ()):
            return False
        return (layer + 1) % int(self.config.get("decoder_sparse_step", 1)) == 0


def _model(model: _Model) -> Iterator[WeightSlice]:
    yield from _vocabulary(model, "model.embed_tokens.weight")
    for layer in range(model.size("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        yield from _attention(model, f"{prefix}.self_attn")
        yield from (_experts if model.is_moe(layer) else _mlp)(model, f"{prefix}.mlp")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _whole(f"{prefix}.{norm}.weight", model.hidden)
    yield _whole("model.norm.weight", model.hidden)
    if not model.flag("tie_word_embeddings"):
        yield from _vocabulary(model, "lm_head.weight")


def _whole(name: str, *shape: int) -> WeightSlice:
    box = tuple((0, size) for size in shape)
    return WeightSlice(name, box, name, box)


def _vocabulary(model: _Model, name: str) -> Iterator[WeightSlice]:
    vocabulary = model.size("vocab_size")
    padded = -(-vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    start, stop = model.part(padded, "the padded vocabulary")
    stop = min(stop, vocabulary)
    if start < stop:
        columns = (0, model.hidden)
        yield WeightSlice(name, ((start, stop), columns), name, ((0, stop - start), columns))


def _attention(model: _Model, prefix: str) -> Iterator[WeightSlice]:
    bias = model.type == "qwen2" or model.flag("attention_bias")
    offset = 0
    for projection, (start, stop) in _heads(model):
        rows, local = (start, stop), (offset, offset + stop - start)
        yield from _stacked(f"{prefix}.{projection}", f"{prefix}.qkv_proj", rows, local, model.hidden, bias)
        offset += stop - start
    columns = model.part(model.size("num_attention_heads") * model.head_dim, "the query heads' columns")
    yield from _row_parallel(f"{prefix}.o_proj", model.hidden, columns, bias and model.type == "llama")
    if model.type in ("qwen3", "qwen3_moe"):
        yield _whole(f"{prefix}.q_norm.weight", model.head_dim)
        yield _whole(f"{prefix}.k_norm.weight", model.head_dim)


def _heads(model: _Model) -> Iterator[tuple[str, tuple[int, int]]]:
    """Rows of q, k and v that this rank holds."""
    queries, dim = model.part(model.size("num_attention_heads"), "the attention heads"), model.head_dim
    keys, heads = model.key_value_heads, (0, 0)
    if keys >= model.tp:
        heads = model.part(keys, "the key/value heads")
    elif model.tp % keys == 0:
        replica = model.rank // (model.tp // keys)
        heads = (replica, replica + 1)
    else:
        raise LayoutError(
            f"tensor parallel size {model.tp} is not a multiple of the {keys} key/value heads; choose one that is"
        )
    for projection, (start, stop) in (("q_proj", queries), ("k_proj", heads), ("v_proj", heads)):
        yield projection, (start * dim, stop * dim)


def _mlp(model: _Model, prefix: str) -> Iterator[WeightSlice]:
    start, stop = part = model.part(model.size("intermediate_size"), "the intermediate size")
    size, bias = stop - start, model.type == "llama" and model.flag("mlp_bias")
    for index, projection in enumerate(("gate_proj", "up_proj")):
        local = (index * size, (index + 1) * size)
        yield from _stacked(f"{prefix}.{projection}", f"{prefix}.gate_up_proj", part, local, model.hidden, bias)
    yield from _row_parallel(f"{prefix}.down_proj", model.hidden, part, bias)


def _experts(model: _Model, prefix: str) -> Iterator[WeightSlice]:
    experts, columns = model.experts, (0, model.hidden)
    yield _whole(f"{prefix}.gate.weight", experts, model.hidden)
    start, stop = part = model.part(model.size("moe_intermediate_size"), "the experts' intermediate size")
    size = stop - start
    w13, w2 = f"{prefix}.experts.w13_weight", f"{prefix}.experts.w2_weight"
    for expert in range(experts):
        one, name = (expert, expert + 1), f"{prefix}.experts.{expert}"
        yield WeightSlice(f"{name}.gate_proj.weight", (part, columns), w13, (one, (0, size), columns))
        yield WeightSlice(f"{name}.up_proj.weight", (part, columns), w13, (one, (size, 2 * size), columns))
        yield WeightSlice(f"{name}.down_proj.weight", (columns, part), w2, (one, columns, (0, size)))


def _stacked(
    name: str, tensor: str, rows: tuple[int, int], local: tuple[int, int], columns: int, bias: bool
) -> Iterator[WeightSlice]:
    """Rows of a column-parallel weight, and of its bias, stacked with others in one tensor."""
    yield WeightSlice(f"{name}.weight", (rows, (0, columns)), f"{tensor}.weight", (local, (0, columns)))
    if bias:
        yield WeightSlice(f"{name}.bias", (rows,), f"{tensor}.bias", (local,))


def _row_parallel(name: str, rows: int, columns: tuple[int, int], bias: bool) -> Iterator[WeightSlice]:
    """Columns of a row-parallel weight; every rank holds the whole bias."""
    box: Box = ((0, rows), columns)
    yield WeightSlice(f"{name}.weight", box, f"{name}.weight", ((0, rows), (0, columns[1] - columns[0])))
    if bias:
        yield _whole(f"{name}.bias", rows)
