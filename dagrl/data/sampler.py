"""The order in which a run draws its examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from dagrl.config import DataConfig, Json
from dagrl.data.tokenization import Row, digest_of
from dagrl.errors import CheckpointError, DataError


class Sampler:
    """An endless order over `count` examples, shuffled in every epoch, whose position can be saved and restored.

    `digest` (`dagrl.data.tokenization.digest_of`) identifies the examples: a position is valid only for the same ones.
    """

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True, digest: str = "") -> None:
        if count < 1:
            raise DataError("no examples to draw from; check data.path or data.task")
        self._count, self._seed, self._shuffle = count, seed, shuffle
        # Everything that determines the examples of an epoch and their order.
        self._identity: dict[str, Json] = {"count": count, "seed": seed, "shuffle": shuffle, "digest": digest}
        self._epoch, self._position = 0, 0
        self._order = self._permutation()

    def take(self, number: int) -> list[int]:
        """Returns the indices of the next `number` examples, continuing into the next epoch."""
        indices: list[int] = []
        while len(indices) < number:
            if self._position == self._count:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            more = self._order[self._position : self._position + number - len(indices)]
            self._position += len(more)
            indices += more
        return indices

    def state(self) -> dict[str, Json]:
        """Returns the position for `restore`."""
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continues from a saved position. Raises CheckpointError if its data or order differ."""
        expected = self._identity
        saved = {name: state.get(name) for name in expected}
        if saved != expected:
            others = {**saved, "digest": expected["digest"]} == expected
            raise CheckpointError(
                f"the data position was saved with {saved}, but this run has {expected}; "
                + ("tokens, loss masks, references or order of the examples differ; " if others else "")
                + "use the same data, data.seed, data.shuffle, tokenizer and chat template"
            )
        self._epoch, self._position = cast(int, state["epoch"]), cast(int, state["position"])
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._count))
        order: Sequence[int] = np.random.default_rng((self._seed, self._epoch)).permutation(self._count).tolist()
        return list(order)


class MixtureSampler:
    """An endless order over several sources, each in its own order, in the shares of their weights.

    `sources` has the indices of each source's examples. Every draw takes the next example of the source that is furthest
    behind its share, so that any stretch of draws has the shares to within a few examples.
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
        self._sources = sources
        self._shares = {name: weights[name] / total for name in sources}
        self._samplers = {
            name: Sampler(len(indices), seed + number, shuffle, digest)
            for number, (name, indices) in enumerate(sources.items())
        }
        self._drawn = dict.fromkeys(sources, 0)

    def take(self, number: int) -> list[int]:
        """Returns the indices of the next `number` examples."""
        return [self._next() for _ in range(number)]

    def state(self) -> dict[str, Json]:
        """Returns the position for `restore`."""
        orders: dict[str, Json] = {name: sampler.state() for name, sampler in self._samplers.items()}
        return {"shares": dict(self._shares), "drawn": dict(self._drawn), "sources": orders}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continues from a saved position. Raises CheckpointError if its data, order or weights differ."""
        if state.get("shares") != self._shares:
            raise CheckpointError(
                f"the data position was saved with the shares {state.get('shares')} of data.mixture, but this run has "
                f"{self._shares}; use the same sources and weights"
            )
        orders = cast("Mapping[str, Mapping[str, Json]]", state["sources"])
        for name, sampler in self._samplers.items():
            sampler.restore(orders[name])
        self._drawn = dict(cast("Mapping[str, int]", state["drawn"]))

    def _next(self) -> int:
        total = sum(self._drawn.values()) + 1
        name = max(self._sources, key=lambda name: self._shares[name] * total - self._drawn[name])
        self._drawn[name] += 1
        (place,) = self._samplers[name].take(1)
        return self._sources[name][place]


def open_sampler(rows: Sequence[Row], config: DataConfig) -> Sampler | MixtureSampler:
    """Returns the order in which a run draws `rows`. Raises DataError if a source of the mixture has none."""
    digest = digest_of(rows)
    if not config.mixture:
        return Sampler(len(rows), config.seed, config.shuffle, digest)
    sources = {name: [index for index, row in enumerate(rows) if row.task == name] for name in config.mixture}
    for name, indices in sources.items():
        if not indices:
            raise DataError(f"data.mixture.{name} has no examples to draw from; check its path or task, or leave it out")
    weights = {name: config.mixture[name].weight or float(len(indices)) for name, indices in sources.items()}
    return MixtureSampler(sources, weights, config.seed, config.shuffle, digest)
