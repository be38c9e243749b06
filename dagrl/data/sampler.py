"""An order over the examples of a run, whose position can be saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from dagrl.config import Json
from dagrl.errors import CheckpointError, DataError


class Sampler:
    """An endless order over `count` examples, shuffled anew each epoch, whose position can be saved and restored.

    `digest` (`dagrl.data.tokenization.digest_of`) tells the examples from others that are as many: a position is of no
    others.
    """

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True, digest: str = "") -> None:
        if count < 1:
            raise DataError("there are no examples to draw from")
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._digest = digest
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def take(self, number: int) -> list[int]:
        """Positions of the next `number` examples; goes on into the next epoch where one ends."""
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
        """What `restore` needs to go on from here."""
        return {**self._order_of(), "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Go on where `state` was taken. Raises CheckpointError when it is of other data or another order."""
        expected = self._order_of()
        found = {name: state.get(name) for name in expected}
        if found != expected:
            others = {**found, "digest": expected["digest"]} == expected
            raise CheckpointError(
                f"the data position was saved with {found}, this run has {expected}; "
                + ("the examples are as many, but their tokens, loss masks, references or order differ; " if others else "")
                + "use the same data, data.seed and data.shuffle, and the same tokenizer and chat template"
            )
        self._epoch, self._position = cast(int, state["epoch"]), cast(int, state["position"])
        self._order = self._permutation()

    def _order_of(self) -> dict[str, Json]:
        """What the examples of an epoch, in their order, follow from."""
        return {"count": self._count, "seed": self._seed, "shuffle": self._shuffle, "digest": self._digest}

    def _permutation(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._count))
        order: Sequence[int] = np.random.default_rng((self._seed, self._epoch)).permutation(self._count).tolist()
        return list(order)
