"""The experts that processed each token during generation, recorded to be replayed in training (`policy.router_replay`).

Rollout Routing Replay (Ma et al. 2025, arXiv:2510.11370): training uses the experts that generation chose, with its own
probabilities of them, so that the log-probabilities of both differ less. A record has an id for each token, layer and
choice, one byte each, or two with more than 255 experts. A token whose bytes are all 255 has no record, nor has a dense
layer of a mixed model: the router then chooses by itself.

In a batch the field `routed_experts` [rows, tokens] has the bytes of a token as one element, so that it is padded, split and
sent like any other field. The module needs only numpy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.config import Json
from dagrl.errors import ConfigError, RunError
from dagrl.runtime.shapes import Array, Batch

ROUTED_EXPERTS = "routed_experts"  # name of the field
MISSING = 255  # every byte of a token without a record
Record = npt.NDArray[np.uint8]  # the bytes of a sequence's first tokens, [tokens, bytes of a token]
NOTHING: Record = np.zeros((0, 0), np.uint8)  # the record of a sequence that generation has not seen


@dataclass(frozen=True)
class RoutedLayers:
    """The sizes of a record: `layers` of the model, dense ones included, and `chosen` of the `experts` of each layer."""

    layers: int
    experts: int
    chosen: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an id."""
        return np.dtype(np.uint8 if self.experts <= MISSING else np.uint16)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's record."""
        return self.layers * self.chosen * self.dtype.itemsize

    @property
    def field_dtype(self) -> str:
        """The type of the field's elements."""
        return f"S{self.token_bytes}"


def routed_layers(hf_config: Mapping[str, Json]) -> RoutedLayers:
    """Reads the sizes from a model's `config.json`. Raises ConfigError if it has no experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")  # of Qwen, Mixtral and DeepSeek
    sizes = [next((hf_config[name] for name in names if hf_config.get(name)), None)]
    sizes += [hf_config.get(name) for name in ("num_hidden_layers", "num_experts_per_tok")]
    experts, layers, chosen = sizes
    if not (isinstance(experts, int) and isinstance(layers, int) and isinstance(chosen, int)):
        raise ConfigError(
            f"a model of type {hf_config.get('model_type')!r} has no experts to replay or balance: its config.json has none "
            f"of {', '.join(names)}, or no num_experts_per_tok. Set policy.router_replay=false and no moe_aux_loss_coeff"
        )
    return RoutedLayers(layers, experts, chosen)


def field_of(records: Sequence[Record | None], width: int) -> Array:
    """Returns the field [rows, width] of sequences, whose records may be shorter than they are."""
    known = [record for record in records if record is not None]
    if len(known) < len(records) or not known:
        raise RunError(
            f"{len(records) - len(known)} of {len(records)} sequences have no record of their experts; the generation "
            "worker must return `FinishedRequest.experts` with policy.router_replay=true"
        )
    size = max(record.shape[1] for record in known)
    table = np.full((len(known), width, size), MISSING, np.uint8)
    for row, record in zip(table, known, strict=True):
        row[: len(record)] = record[:width] if len(record) else MISSING
    return table.reshape(len(known), width * size).view(f"S{size}")


def field_bytes(field: Array) -> npt.NDArray[np.uint8]:
    """Returns the field [rows, tokens] as bytes [rows, tokens, bytes of a token]."""
    return np.ascontiguousarray(field).view(np.uint8).reshape(*field.shape, field.dtype.itemsize)


def with_empty_record(batch: Batch) -> Batch:
    """Returns the batch with a field in which no token has a record, if it has the field."""
    field = batch.fields.get(ROUTED_EXPERTS)
    if field is None:
        return batch
    return batch.with_fields(**{ROUTED_EXPERTS: np.full_like(field, bytes([MISSING]) * field.dtype.itemsize)})


def join_records(first: Record | None, second: Record | None) -> Record | None:
    """Returns the record of a sequence that was generated in two requests, both from the start of the sequence.

    Where both have a token, the first counts: its experts made the token's log-probability.
    """
    if first is None or second is None:
        return second if first is None else first
    joined = (second if len(second) > len(first) else first).copy()
    both = min(len(first), len(second))
    lacking = (first[:both] == MISSING).all(-1, keepdims=True)
    joined[:both] = np.where(lacking, second[:both], first[:both])
    return joined
