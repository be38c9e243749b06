"""Interfaces that rollouts need from a run: generation engines (`dagrl.run.engines`), prompts, and a stop signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from dagrl.data.tokenization import Prompt
from dagrl.errors import WorkerError
from dagrl.rl.generation import Generated
from dagrl.runtime.shapes import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class QuantumResult:
    """A finished quantum: for each shard its requests and how long its engine computed, and the replay's overhead."""

    generated: Sequence[Generated]  # [shards]
    busy_s: Sequence[float]  # [shards]
    overhead_s: float


class Quantum(Protocol):
    """A quantum in flight."""

    def result(self) -> QuantumResult:
        """Waits for the quantum. Raises WorkerError if an engine failed."""

    def partial(self) -> Mapping[int, Generated]:
        """Returns the results of the shards that did not fail, after `result` has raised."""


class WeightUpdate(Protocol):
    """An update of the engines' weights in flight."""

    def result(self) -> dict[str, float]:
        """Waits for it, and returns its metrics. Raises WorkerError if an engine failed."""


class GenerationEngines(Protocol):
    """The engines of all generation shards. Quanta run in the order in which they are submitted."""

    @property
    def shards(self) -> int:
        """The number of engines."""

    @property
    def burst_steps(self) -> int:
        """Decode steps that an engine makes at once; a quantum of fewer costs as much as one of these."""

    def submit(self, requests: Batch, rows: Sequence[npt.NDArray[np.intp]]) -> Quantum:
        """Starts a quantum. `rows[shard]` are the rows of `requests` that the shard adds to its engine."""

    def abort(self, requests: Sequence[int]) -> None:
        """Removes unfinished requests, by id; others are ignored. No quantum may be in flight."""

    def replace(self, error: WorkerError) -> set[int] | None:
        """Starts replacing the engines named in `error` and fails the quanta in flight; the survivors are idle on return.

        Returns the shards whose engines are replaced. They take no requests until the next update. None if the run has to
        restart.
        """

    @property
    def ready(self) -> bool:
        """Whether all new engines have started, so that `update` does not wait for them."""

    @property
    def moves(self) -> bool:
        """Whether engines may leave their GPUs before an update, so that no quantum may wait behind it."""

    def update(self, version: int) -> WeightUpdate:
        """Starts to send the weights of `version`, which the train workers hold, to all engines.

        Connects new engines first, once they have started; no quantum may be in flight if there are any.
        """


class Stop(Protocol):
    """Whether the user requested a stop."""

    @property
    def requested(self) -> bool:
        """True from the request on."""

    def check(self) -> None:
        """Raises StopRequestedError if a stop was requested."""


@dataclass(frozen=True)
class PromptData:
    """The prompts of a run, and the tokenizer that encoded them. `evaluation` has those of `evaluation.sets`. With `media`,
    some have images.
    """

    train: Sequence[Prompt]
    validation: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerFast
    evaluation: Sequence[Prompt] = ()
    media: bool = False
