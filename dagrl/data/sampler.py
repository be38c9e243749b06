"""The order in which a run draws its examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dagrl.data.tokenization import Row, digest_of
from dagrl.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from dagrl.config import DataConfig, Json


class Sampler:
    """An endless order over the examples of one or more sources, whose position can be saved and restored.

    `sources` has the indices of each source's examples, which are shuffled in every epoch of that source. Every draw takes
    the next example of the source that is furthest behind its share of `weights`, so that any stretch of draws has the
    shares to within a few examples. `digest` (`dagrl.data.tokenization.digest_of`) identifies the examples: a position is
    valid only for the same ones.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[int]],
        weights: Mapping[str, float],
        seed: int = 0,
        shuffle: bool = True,
        digest: str = "",
    ) -> None:
        total = sum(weights[name] for name in sources)
        self._sources, self._seed, self._shuffle = sources, seed, shuffle
        self._shares = {name: weights[name] / total for name in sources}
        # Everything that determines the examples of an epoch and their order.
        self._identity: dict[str, Json] = {
            "counts": {name: len(indices) for name, indices in sources.items()},
            "shares": dict(self._shares),
            "seed": seed,
            "shuffle": shuffle,
            "digest": digest,
        }
        self._drawn = dict.fromkeys(sources, 0)
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}  # the epoch of each source, and its order

    def take(self, number: int) -> list[int]:
        """Returns the indices of the next `number` examples, continuing into the next epoch."""
        return [self._next() for _ in range(number)]

    def state(self) -> dict[str, Json]:
        """Returns the position for `restore`."""
        return {**self._identity, "drawn": dict(self._drawn)}

    def restore(self, state: Json) -> None:
        """Continues from a saved position. Raises CheckpointError if its data, order or weights differ."""
        expected, position = self._identity, cast("Mapping[str, Any]", state)
        saved = {name: position.get(name) for name in expected}
        if saved != expected:
            others = {**saved, "digest": expected["digest"]} == expected
            raise CheckpointError(
                f"the data position was saved with {saved}, but this run has {expected}; "
                + ("tokens, loss masks, references or order of the examples differ; " if others else "")
                + "use the same data, data.mixture, data.seed, data.shuffle, tokenizer and chat template"
            )
        self._drawn = dict(position["drawn"])

    def _next(self) -> int:
        total = sum(self._drawn.values()) + 1
        name = max(self._sources, key=lambda name: self._shares[name] * total - self._drawn[name])
        epoch, place = divmod(self._drawn[name], len(self._sources[name]))
        self._drawn[name] += 1
        if self._orders.get(name, (-1, ()))[0] != epoch:
            random = np.random.default_rng((self._seed + list(self._sources).index(name), epoch))
            count = len(self._sources[name])
            self._orders[name] = epoch, random.permutation(count).tolist() if self._shuffle else range(count)
        return self._sources[name][self._orders[name][1][place]]


def open_sampler(rows: Sequence[Row], config: DataConfig) -> Sampler:
    """Returns the order in which a run draws `rows`. Raises DataError if a source of the mixture has none."""
    sources: Mapping[str, Sequence[int]] = {"": range(len(rows))}
    if config.mixture:
        sources = {name: [index for index, row in enumerate(rows) if row.task == name] for name in config.mixture}
    for name, indices in sources.items():
        if not indices:
            raise DataError(f"data.mixture.{name} has no examples to draw from; check its path or task, or leave it out")
    given = {name: source.weight for name, source in config.mixture.items()}
    weights = {name: given.get(name) or float(len(indices)) for name, indices in sources.items()}
    return Sampler(sources, weights, config.seed, config.shuffle, digest_of(rows))
