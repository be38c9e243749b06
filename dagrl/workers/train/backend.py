"""The interface between `TrainWorker` and what computes its model: Megatron, or a backend of your own.

`TrainWorker` splits rows, computes losses and metrics, and orders the calls. A `Backend` has this rank's part of the model,
with its process groups, optimizer and files. Three rules hold for every backend:

- Each rank of a data-parallel group runs equally many microbatches, empty ones (all padding) included, because a forward
  pass may be a collective.
- Losses are divided by the counts of the global batch already. Gradients are summed over microbatches and over
  data-parallel and context-parallel ranks, never averaged.
- A method is called on all ranks of the group at the same time, unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dagrl.config import Config, Json
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.train.optimizer import Gradients

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from dagrl.workers.train.checkpoint import Piece
    from dagrl.workers.train.logprobs import TokenHead
    from dagrl.workers.train.microbatches import Microbatch, Microbatches, RoutedModel
    from dagrl.workers.train.offload import StatePart
    from dagrl.workers.train.optimizer import OptimizerSteps
    from dagrl.workers.train.row_plans import ParallelRank

Score = Callable[["Microbatch", "Tensor"], tuple["Tensor", Any]]
"""Takes a microbatch and the model's output for it. Returns this worker's share of the loss, a scalar, and a report."""


@dataclass(frozen=True)
class ModelSpec:
    """A worker's arguments to its backend.

    `source`: the model's Hugging Face directory. `hf_config`: its `config.json`, with any scalar head. `trains`: whether the
    model has gradients and an optimizer. `scalar`: whether it gives one number per token in place of a distribution over the
    vocabulary, as critics and reward models do.
    """

    context: WorkerContext
    config: Config
    source: Path
    hf_config: Mapping[str, Json]
    device: torch.device
    trains: bool
    scalar: bool


class Model(Protocol):
    """This rank's part of a model that runs forward and, if it is trained, backward."""

    def run(self, microbatches: Microbatches, score: Score, *, backward: bool) -> list[Any]:
        """Runs every microbatch and calls `score` on its output. Returns the reports, in the order of the microbatches.

        Outputs are the last hidden states [b, s, hidden size], or numbers [b, s] of a scalar head. Pipeline stages without
        them return an empty list. With `backward`, adds the loss's gradients to those of earlier microbatches and sums
        them over data-parallel and context-parallel ranks. Otherwise it is called without gradients.
        """

    def head(self, temperature: float) -> TokenHead | None:
        """Returns the output layer; None for a scalar head, and on stages without outputs."""

    def weights(self) -> Mapping[str, Tensor]:
        """Returns parameters, and buffers that training changes, by local name; adapters are not among them.

        Live tensors, whose content a reference policy swaps with its own for a while.
        """


class TrainedModel(Model, Gradients, Protocol):
    """A model with gradients and an optimizer."""

    @property
    def steps(self) -> OptimizerSteps:
        """Counters of optimizer steps, which are part of a checkpoint."""

    def zero_gradients(self) -> None:
        """Sets all gradients to zero."""

    def gradients(self) -> list[Tensor]:
        """Returns this rank's part of the gradients after a backward pass, live. No collective."""

    def reset_optimizer(self) -> None:
        """Zeros moments and step counts, and copies any master weights from the model."""

    def step_count(self) -> float:
        """Returns the optimizer's count of updates, on which its bias corrections depend; 0 if the pieces have it."""

    def set_step_count(self, count: float) -> None:
        """Sets the optimizer's count of updates, unless the pieces have it."""

    def step_metrics(self) -> StepMetrics:
        """Returns the model's own metrics of the last training pass, such as the load of its experts."""

    def state(self, part: StatePart) -> list[Tensor]:
        """Returns the tensors of a part, for moving them between device and host. No collective."""

    def before_offload(self, what: Sequence[str]) -> None:
        """Drops references to the memory of these parts, such as recorded graphs. No collective."""


class Backend(Protocol):
    """One rank's model with its process groups, optimizer and files. The constructor only keeps what it is given."""

    checkpoint_format: ClassVar[str]
    """Names the pieces that its checkpoints have; another backend or version cannot load them."""

    def __init__(self, spec: ModelSpec) -> None: ...

    @property
    def captures(self) -> bool:
        """Whether passes are captured as CUDA graphs. Phases then run on a stream of their own, and warm-ups run each shape
        twice. Known before `setup`."""

    @property
    def shares(self) -> bool:
        """Whether packed rows may share prefixes, if the settings do (`Segments.heads`). Known after `setup`."""

    # Before any actor starts, on the driver. `hf_config` is the model's `config.json`, with any scalar head

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raises a UserError for a model that cannot be loaded, or not trained in this layout."""

    @staticmethod
    def computed(hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        """Returns all settings that affect the computation. Models for which they are equal have compatible checkpoints.

        Raises ConfigError for a model that cannot be trained.
        """

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> Sequence[WeightSlice]:
        """Returns the slices that `rank` will send in a refit, without a worker."""

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        """Returns environment variables that must be set before torch is imported."""

    # Lifecycle

    @staticmethod
    def prepare() -> None:
        """Imports the libraries that `setup` needs, which may take seconds."""

    def setup(self, address: str) -> None:
        """Joins the other ranks at `address` (host:port of rank 0), builds the model and loads its weights."""

    def abort(self) -> None:
        """Aborts this rank's collectives, so that its peers raise. Called on one rank, from another thread."""

    def shutdown(self) -> None:
        """Leaves the process groups and drops the model, also after an abort or a `setup` that failed. Not a collective."""

    # Computing

    @property
    def model(self) -> TrainedModel: ...

    @property
    def place(self) -> ParallelRank:
        """This worker's coordinates, device and process groups."""

    @property
    def routed(self) -> RoutedModel | None:
        """Sizes of a model with experts, by which batches are split; None without experts."""

    def train_tflop(self, lengths: Iterable[int]) -> float:
        """Returns the TFLOPs of training on whole sequences of these lengths, by the model's formula. No collective."""

    # State

    def base_model(self) -> AbstractContextManager[None] | None:
        """Returns a context in which the model runs without its adapters, as the reference policy. None: it has none, and
        the reference policy is a copy of its weights."""

    # Refits

    def weight_slices(self) -> Sequence[WeightSlice]:
        """Returns which boxes of the Hugging Face parameters, or of adapters, this rank sends. No collective."""

    def sent_tensors(self) -> Mapping[str, Tensor]:
        """Returns the live tensors that `weight_slices` names: parameters, not their data. No collective."""

    def sending(self) -> AbstractContextManager[None]:
        """Returns a context in which `sent_tensors` have the current values."""

    # Files

    def pieces_to_save(self, reference: Mapping[str, Tensor] | None) -> Iterable[Piece]:
        """Yields this rank's part of weights, optimizer state and any `reference` policy: live tensors.

        Names and shapes do not depend on the layout, and the ranks together give each element once.
        """

    def pieces_to_load(self, reference: Mapping[str, Tensor] | None) -> Iterable[Piece]:
        """Yields everything that this rank needs, to be filled in place; `reference` if the checkpoint has one."""

    def export_hf(self, directory: str, group: ProcessGroup | None) -> None:
        """Writes the model as a Hugging Face directory that transformers can load, with adapters merged.

        Ranks wait for each other's files in `group`; None for a single process.
        """
