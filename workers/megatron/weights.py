"""Where Megatron-Core's GPTModel (local layer spec) holds each Hugging Face parameter, as a pure function.

Tensor names are those of `named_parameters()` of the rank's model, prefixed `vp{stage}.` where a rank has several virtual
stages. Rules, as in Megatron-Core 0.16: `transformer/attention.py` (query, key and value rows interleaved by query group),
`transformer/mlp.py` (gate above up in `linear_fc1`), `transformer/moe/experts.py` (`local_experts.{i}`, contiguous experts a
rank), `models/gpt/gpt_model.py` (a copy of tied embeddings on the last stage). Rows past the vocabulary have no slice, so a
rank whose rows are all padding has none of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dagrl.config import Json
from dagrl.errors import LayoutError
from dagrl.layout import Coordinates, ParallelLayout
from dagrl.refit.slices import Box, WeightSlice
from workers.megatron.architecture import Architecture, check_layout, padded_vocabulary, read_architecture


def megatron_weight_slices(hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
    """Everything that `rank` holds.

    Raises ConfigError for a model without rules, LayoutError where the layout does not fit the model or `rank` the layout.
    """
    check_layout(hf_config, layout)
    model = read_architecture(hf_config)
    rows = (model.heads + 2 * model.kv_heads) * model.head_dim
    if rows % layout.tp:
        raise LayoutError(f"the {rows} rows of query, key and value are not divisible by tp {layout.tp}; choose another tp")
    return _Rank(model, layout, layout.coordinates(rank)).slices()


@dataclass(frozen=True)
class _Rank:
    """One rank's part of a model."""

    model: Architecture
    layout: ParallelLayout
    at: Coordinates

    def slices(self) -> list[WeightSlice]:
        return [held for stage in range(self.layout.vpp) for held in self._stage(stage)]

    def _stage(self, stage: int) -> Iterator[WeightSlice]:
        """One virtual stage: layers are dealt in turn, `vpp` rounds over the pipeline's ranks."""
        prefix = f"vp{stage}." if self.layout.vpp > 1 else ""
        count = self.model.layers // (self.layout.pp * self.layout.vpp)
        first = (stage * self.layout.pp + self.at.pp) * count
        is_first = self.at.pp == 0 and stage == 0
        is_last = self.at.pp == self.layout.pp - 1 and stage == self.layout.vpp - 1
        if is_first:
            yield from self._vocabulary("model.embed_tokens.weight", f"{prefix}embedding.word_embeddings.weight")
        for local in range(count):
            yield from self._layer(f"model.layers.{first + local}.", f"{prefix}decoder.layers.{local}.", first + local)
        if is_last:
            yield self._whole("model.norm.weight", f"{prefix}decoder.final_layernorm.weight", self.model.hidden)
        if is_last and not (self.model.tied and is_first):  # a model on one stage has one storage for both
            head = "model.embed_tokens.weight" if self.model.tied else "lm_head.weight"
            yield from self._vocabulary(head, f"{prefix}output_layer.weight")

    def _vocabulary(self, name: str, tensor: str) -> Iterator[WeightSlice]:
        rows = padded_vocabulary(self.model.vocabulary, self.layout.tp) // self.layout.tp
        start = self.at.tp * rows
        held = min(rows, self.model.vocabulary - start)
        if held > 0:
            columns = (0, self.model.hidden)
            yield WeightSlice(name, ((start, start + held), columns), tensor, ((0, held), columns))

    def _layer(self, hf: str, local: str, layer: int) -> Iterator[WeightSlice]:
        model = self.model
        yield self._whole(f"{hf}input_layernorm.weight", f"{local}input_layernorm.weight", model.hidden)
        yield self._whole(f"{hf}post_attention_layernorm.weight", f"{local}pre_mlp_layernorm.weight", model.hidden)
        yield from self._attention(f"{hf}self_attn.", f"{local}self_attention.")
        if model.experts and model.moe_layers[layer]:
            yield from self._experts(f"{hf}mlp.", f"{local}mlp.")
        else:
            yield from self._mlp(f"{hf}mlp.", f"{local}mlp.", model.ffn, self.layout.tp, self.at.tp)

    def _attention(self, hf: str, local: str) -> Iterator[WeightSlice]:
        model = self.model
        for letter, rows, at in self._query_groups():
            columns = (0, model.hidden)
            yield WeightSlice(f"{hf}{letter}_proj.weight", (rows, columns), f"{local}linear_qkv.weight", (at, columns))
            if model.qkv_bias:
                yield WeightSlice(f"{hf}{letter}_proj.bias", (rows,), f"{local}linear_qkv.bias", (at,))
        width = model.heads * model.head_dim
        yield _columns(f"{hf}o_proj.weight", f"{local}linear_proj.weight", model.hidden, width, self.layout.tp, self.at.tp)
        if model.qk_norm:
            yield self._whole(f"{hf}q_norm.weight", f"{local}q_layernorm.weight", model.head_dim)
            yield self._whole(f"{hf}k_norm.weight", f"{local}k_layernorm.weight", model.head_dim)

    def _query_groups(self) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
        """`(q | k | v, rows in the HF parameter, rows in the local linear_qkv)`.

        The rows of all groups, `[q.. q k v]` each, are cut evenly over tp: with fewer key-value heads than ranks, a rank
        holds a part of a group.
        """
        model, size = self.model, self.model.head_dim
        queries = model.heads // model.kv_heads * size
        rows = (model.heads + 2 * model.kv_heads) * size // self.layout.tp
        start = self.at.tp * rows
        for group in range(model.kv_heads):
            at = group * (queries + 2 * size)
            for letter, length in (("q", queries), ("k", size), ("v", size)):
                low, high = max(at, start), min(at + length, start + rows)
                if low < high:
                    first = group * length + low - at
                    yield letter, (first, first + high - low), (low - start, high - start)
                at += length

    def _experts(self, hf: str, local: str) -> Iterator[WeightSlice]:
        model = self.model
        router: Box = ((0, model.experts), (0, model.hidden))
        yield WeightSlice(f"{hf}gate.weight", router, f"{local}router.weight", router)
        count = model.experts // self.layout.ep
        for index in range(count):
            expert = f"{hf}experts.{self.at.ep * count + index}."
            tensor = f"{local}experts.local_experts.{index}."
            yield from self._mlp(expert, tensor, model.expert_ffn, self.layout.expert_tp, self.at.etp)

    def _mlp(self, hf: str, local: str, width: int, parts: int, part: int) -> Iterator[WeightSlice]:
        rows, columns = width // parts, (0, self.model.hidden)
        box: Box = ((part * rows, (part + 1) * rows), columns)
        yield WeightSlice(f"{hf}gate_proj.weight", box, f"{local}linear_fc1.weight", ((0, rows), columns))
        yield WeightSlice(f"{hf}up_proj.weight", box, f"{local}linear_fc1.weight", ((rows, 2 * rows), columns))
        yield _columns(f"{hf}down_proj.weight", f"{local}linear_fc2.weight", self.model.hidden, width, parts, part)

    def _whole(self, name: str, tensor: str, size: int) -> WeightSlice:
        return WeightSlice(name, ((0, size),), tensor, ((0, size),))


def _columns(name: str, tensor: str, rows: int, width: int, parts: int, part: int) -> WeightSlice:
    """Row-parallel: the columns of dimension 1 cut evenly."""
    columns = width // parts
    return WeightSlice(name, ((0, rows), (part * columns, (part + 1) * columns)), tensor, ((0, rows), (0, columns)))
