"""How inputs of types that are not ours are split over the shards, and their results joined: TensorDict, DataProto, a dict.

register_codec(TensorDict, Codec(lambda value, n: value.chunk(n), torch.cat))        # for all phases
scheduler.add(train, codec=Codec(split_by_tokens, merge), input_bytes=256 << 20)     # for one phase
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.errors import DataError
from dagrl.runtime.edges.packet import encoded
from dagrl.runtime.edges.pickling import Encoded, Shares
from dagrl.runtime.shapes import Batch

Join = Callable[[list[Any]], Any]
"""Makes one result of the shards' results."""


@dataclass(frozen=True)
class Codec:
    """`split(value, n)` returns a part for each of `n` shards; `join(parts)` makes one result of the shards' results.

    A part may be of any type that pickles. Arrays and tensors in it are not copied into the pickle. Parts that are the same
    object are sent once.
    """

    split: Callable[[Any, int], Sequence[Any]]
    join: Join = tuple

    def parts(self, phase: str, value: object, shards: int) -> list[Any]:
        """Returns the parts of an input. Raises DataError if `split` returns another number of them."""
        parts = list(self.split(value, shards))
        if len(parts) != shards:
            raise DataError(
                f"phase {phase!r} runs on {shards} shards, but its codec split a {type(value).__name__} into {len(parts)} "
                "parts; return one part per shard"
            )
        return parts


_codecs: dict[type, Codec] = {}


def register_codec(kind: type, codec: Codec) -> None:
    """Makes every phase without `inputs` split values of a type, or of its subclasses, and join results of that type."""
    _codecs[kind] = codec


def codec_of(kind: type) -> Codec | None:
    """Returns the codec of a type: its own, or that of its closest base class."""
    return next((_codecs[base] for base in kind.__mro__ if base in _codecs), None) if _codecs else None


def share_out(phase: str, codec: Codec | None, value: object, graphs: Sequence[Sequence[int]]) -> tuple[list[object], Join]:
    """Returns the input of each graph, given the shards in each, and how the results of all shards are joined.

    `codec`: the phase's own. Without one, and with none for the value's type, every shard takes the whole value.
    """
    splits = codec or codec_of(type(value))
    if splits is None:
        whole = Encoded.of(value) if isinstance(value, Batch) else encoded(value)  # a batch would be taken apart
        return [whole] * len(graphs), tuple
    parts = splits.parts(phase, value, sum(map(len, graphs)))
    made = {key: Encoded.of(part) for key, part in {id(part): part for part in parts}.items()}
    shares = [tuple(made[id(parts[shard])] for shard in mine) for mine in graphs]
    return [mine[0] if len(mine) == 1 else Shares(mine) for mine in shares], codec.join if codec else _join_registered


def _join_registered(values: Sequence[Any]) -> Any:
    """Joins results of one registered type; returns a tuple of any others."""
    codecs = {codec_of(type(value)) for value in values}
    codec = codecs.pop() if len(codecs) == 1 else None
    return tuple(values) if codec is None else codec.join(list(values))
