"""What computes the model of a train worker: the interface between `TrainWorker` and Megatron, or a backend of your own.

`TrainWorker` has rows, losses, metrics and the order of what happens. A `Backend` has this rank's part of the model, with
its process groups, optimizer and files. Three rules hold for every backend:

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
from typing import TYPE_CHECKING, Any, Protocol

from dagrl.config import Config, Json
from dagrl.files import FileEntry
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.start_parts import StartParts
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.train.optimizer import Gradients

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dagrl.workers.train.logprobs import TokenHead
    from dagrl.workers.train.microbatches import Microbatch, Microbatches, RoutedModel
    from dagrl.workers.train.offload import StatePart
    from dagrl.workers.train.optimizer import OptimizerSteps
    from dagrl.workers.train.row_plans import ParallelRank

Score = Callable[["Microbatch", "Tensor"], tuple["Tensor", Any]]
"""Takes a microbatch and the model's output for it. Returns this worker's share of the loss, a scalar, and a report."""


@dataclass(frozen=True)
class ModelSpec:
    """What a worker tells its backend.

    `trains`: whether the model has gradients and an optimizer. `scalar`: whether it gives one number per token in place of
    a distribution over the vocabulary, as critics and reward models do.
    """

    context: WorkerContext
    config: Config
    device: torch.device
    trains: bool
    scalar: bool
    start_parts: StartParts


class Model(Protocol):
    """This rank's part of a model that runs forward and, if it is trained, backward."""

    def run(self, microbatches: Microbatches, score: Score, *, backward: bool) -> list[Any]:
        """Runs every microbatch and calls `score` on its output. Returns the reports, in the order of the microbatches.

        Outputs are the last hidden states [b, s, hidden size], or numbers [b, s] of a scalar head. Pipeline stages without
        them return an empty list. With `backward`, adds the loss's gradients to those of earlier microbatches and sums
        them over data-parallel and context-parallel ranks. Otherwise it is called without gradients.
        """
        ...

    def head(self, temperature: float) -> TokenHead | None:
        """Returns what makes log-probabilities of the outputs; None for a scalar head, and on stages without outputs."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Returns parameters, and buffers that training changes, by local name; adapters are not among them.

        Live objects, whose `.data` a reference policy may replace for a while.
        """
        ...


class TrainedModel(Model, Gradients, Protocol):
    """A model with gradients and an optimizer."""

    @property
    def steps(self) -> OptimizerSteps:
        """Counters of optimizer steps, which are part of a checkpoint."""
        ...

    def zero_gradients(self) -> None:
        """Sets all gradients to zero."""
        ...

    def reset_optimizer(self) -> None:
        """Zeros moments and step counts, and copies any master weights from the model."""
        ...

    def settle(self) -> None:
        """Completes what an optimizer step left to the next forward pass, before a phase that is not a training step."""
        ...

    def step_metrics(self) -> StepMetrics:
        """Returns what the model itself reports of the last training pass, such as the load of its experts."""
        ...

    def state(self, part: StatePart) -> list[Tensor]:
        """Returns the tensors of a part, for moving them between device and host. No collective."""
        ...

    def before_offload(self, what: Sequence[str]) -> None:
        """Drops what refers to the memory of these parts, such as recorded graphs. No collective."""
        ...


class CheckpointSave(Protocol):
    """A checkpoint that is being written."""

    @property
    def is_written(self) -> bool:
        """Whether all files are written, so that `finish` does not wait."""
        ...

    def finish(self, timeout_s: float) -> Mapping[str, FileEntry]:
        """Waits until all ranks have written their files. Returns size and CRC-32 of those here, or raises."""
        ...


class Backend(Protocol):
    """One rank's model with its process groups, optimizer and files. The constructor only keeps what it is given."""

    def __init__(self, spec: ModelSpec) -> None: ...

    @property
    def captures(self) -> bool:
        """Whether passes are captured as CUDA graphs. Phases then run on a stream of their own, and warm-ups run each shape
        twice. Known before `setup`."""
        ...

    # Before any actor starts, on the driver. `hf_config` is the model's `config.json`, with any scalar head

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raises a UserError for a model that cannot be loaded, or not trained in this layout."""
        ...

    @staticmethod
    def check_checkpoint(config: Config, hf_config: Mapping[str, Json], directory: str) -> None:
        """Raises a UserError for a checkpoint that a run of this model cannot load."""
        ...

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> Sequence[WeightSlice]:
        """Returns what `rank` will send in a refit, without a worker."""
        ...

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        """Returns environment variables that must be set before torch is imported."""
        ...

    # Lifecycle

    @staticmethod
    def prepare() -> None:
        """Imports what `setup` needs."""
        ...

    def setup(self, address: str) -> None:
        """Meets the other ranks at `address` (host:port of rank 0), builds the model and loads its weights."""
        ...

    def abort(self) -> None:
        """Breaks this rank's collectives, so that its peers raise. Called on one rank, from another thread."""
        ...

    def shutdown(self) -> None:
        """Leaves the process groups and drops the model, also after an abort or a `setup` that failed. Not a collective."""
        ...

    # Computing

    @property
    def model(self) -> TrainedModel: ...

    @property
    def place(self) -> ParallelRank:
        """This worker's coordinates, device and process groups."""
        ...

    @property
    def routed(self) -> RoutedModel | None:
        """What splitting a batch needs to know of a model with experts; None without experts."""
        ...

    def train_tflop(self, lengths: Iterable[int]) -> float:
        """Returns the TFLOPs of training on whole sequences of these lengths, by the model's formula. No collective."""
        ...

    # State

    def base_model(self) -> AbstractContextManager[None] | None:
        """Returns a context in which the model runs without its adapters, as the reference policy. None: it has none, and
        the reference policy is a copy of its weights."""
        ...

    def frozen_model(self, directory: Path) -> Model:
        """Loads another model, which only runs forward, in the same layout and process groups."""
        ...

    # Refits

    def weight_slices(self) -> Sequence[WeightSlice]:
        """Returns which boxes of the Hugging Face parameters, or of adapters, this rank sends. No collective."""
        ...

    def weight_config(self) -> dict[str, Json]:
        """Returns the keys of the model's configuration that generation workers must agree with. No collective."""
        ...

    def sent_tensors(self) -> Mapping[str, Tensor]:
        """Returns the live tensors that `weight_slices` names: parameters, not their data. No collective."""
        ...

    def sending(self) -> AbstractContextManager[None]:
        """Returns a context in which `sent_tensors` have the current values."""
        ...

    # Files

    def start_save(self, directory: str, reference: Mapping[str, Tensor] | None, *, background: bool) -> CheckpointSave:
        """Starts writing weights, optimizer, counters, random generators and any `reference` policy to `directory`.

        With `background` training may change them on return. `dagrl.workers.train.checkpoint` writes them at any layout.
        """
        ...

    def load(self, directory: str) -> Mapping[str, Tensor] | None:
        """Loads a checkpoint. Returns the reference policy's weights, if it has any. Raises CheckpointError."""
        ...

    def export_hf(self, directory: str) -> None:
        """Writes the model as a Hugging Face directory that transformers can load, with adapters merged."""
        ...
