"""The order in which a run draws its examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from dagrl.config import Json
from dagrl.errors import CheckpointError, DataError


class Sampler:
    """An endless order over `count` examples, shuffled in every epoch, whose position can be saved and restored.

    `digest` (`dagrl.data.tokenization.digest_of`) identifies the examples: a position is valid only for the same ones.
    """

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True, digest: str = "") -> None:
        if count < 1:
            raise DataError("no examples to draw from; check data.path or data.task")
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._digest = digest
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def take(self, number: int) -> list[int]:
        """Returns the indices of the next `number` examples, continuing into the next epoch."""
        taken: list[int] = []
        while len(taken) < number:
            if self._position == self._count:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            more = self._order[self._position : self._position + number - len(taken)]
            self._position += len(more)
            taken += more
        return taken

    def state(self) -> dict[str, Json]:
        """Returns the position for `restore`."""
        return {**self._order_of(), "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continues from a saved position. Raises CheckpointError if its data or order differ."""
        expected = self._order_of()
        found = {name: state.get(name) for name in expected}
        if found != expected:
            others = {**found, "digest": expected["digest"]} == expected
            raise CheckpointError(
                f"the data position was saved with {found}, but this run has {expected}; "
                + ("tokens, loss masks, references or order of the examples differ; " if others else "")
                + "use the same data, data.seed, data.shuffle, tokenizer and chat template"
            )
        self._epoch, self._position = cast(int, state["epoch"]), cast(int, state["position"])
        self._order = self._permutation()

    def _order_of(self) -> dict[str, Json]:
        """Returns everything that determines the examples of an epoch and their order."""
        return {"count": self._count, "seed": self._seed, "shuffle": self._shuffle, "digest": self._digest}

    def _permutation(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._count))
        order: Sequence[int] = np.random.default_rng((self._seed, self._epoch)).permutation(self._count).tolist()
        return list(order)
