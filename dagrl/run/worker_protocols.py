"""The methods that training loops call on workers outside of phases. Which protocols apply depends on the configuration.

Every call goes to all workers of a group at once. The methods that phases name are checked when the phases are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dagrl.config import Config, FsdpConfig, Json, MegatronConfig, OptimizerConfig, PolicyConfig
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, TRAIN
from dagrl.config.section import Section
from dagrl.errors import ConfigError
from dagrl.files import FileEntry
from dagrl.machine import DeviceMemory
from dagrl.refit.connect import RefitWorker
from dagrl.refit.slices import WeightSlice
from dagrl.rl.algorithm import planned_algorithm
from dagrl.rl.preferences import gives_scores
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Array, Batch
from dagrl.telemetry.metrics import StepMetrics


class TrainWorker(Protocol):
    """Every train worker."""

    def save_checkpoint(self, directory: str, /) -> Mapping[str, FileEntry] | None:
        """Writes everything that the next step depends on to `directory`. All workers are called together.

        Returns size and CRC-32 of files that this worker wrote, by their path in `directory`. The driver computes those of
        files that no worker returns.
        """

    def load_checkpoint(self, directory: str, /) -> None:
        """Restores a checkpoint. Its files are verified."""


class RolloutTrainWorker(TrainWorker, RefitWorker, Protocol):
    """A train worker whose weights go to generation."""

    def reset_optimizer(self) -> None:
        """Forgets moments and schedule, as if training began with the current weights."""


class LogprobKeeper(Protocol):
    """An optional method of train workers, for the samples in `rollouts/`."""

    def kept_logprobs(self) -> Mapping[str, Mapping[int, Array]]:
        """Returns the log-probabilities of the current step, by name (`prev_logprobs`, `reference_logprobs`, `entropy`)
        and row id: float32 [tokens] of the whole row. One worker of each shard gives them, the others nothing."""


class CertifiedTrainWorker(Protocol):
    """Optional methods of train workers, for `dagrl certify` and `dagrl replay`."""

    def weight_digests(self) -> Mapping[str, Sequence[float]]:
        """Returns of each tensor of weights a checksum, its norm, the machine epsilon of its type, and a sketch: numbers
        that change with every element."""

    def compare_gradients(
        self, batches: Sequence[Batch], others: Sequence[Batch], other: Config, /
    ) -> tuple[StepMetrics, StepMetrics, float]:
        """Computes the gradients of two losses on this worker's shard, without a step: the run's, and that of the
        configuration `other` on rows of its own. Returns the metrics of each, with `grad_norm`, and the norm of the
        difference of the two gradients."""


class CheckpointChecker(Protocol):
    """Optional: a worker class that knows which checkpoints it can load."""

    @staticmethod
    def check_checkpoint(config: Config, hf_config: Mapping[str, Json], directory: str, /) -> None:
        """Raises a UserError for a checkpoint that a run of this model cannot load. Called before any actor starts."""


class BackgroundSaver(Protocol):
    """A train worker that writes checkpoints during training (`checkpointing.async_save`)."""

    def save_checkpoint(self, directory: str, background: bool = False, /) -> Mapping[str, FileEntry] | None:
        """Copies the state and returns None with `background`; the copy is written while training continues."""

    def checkpoint_written(self) -> bool:
        """Returns whether this worker has written its part."""

    def finish_checkpoint(self) -> Mapping[str, FileEntry] | None:
        """Waits for the checkpoint. Returns the files as `save_checkpoint` does."""


class HuggingFaceExporter(Protocol):
    """A train worker that exports the policy (`checkpointing.export_hf`)."""

    def export_hf(self, directory: str, /) -> None:
        """Writes the policy as a Hugging Face directory. All workers write it together."""


class ReferenceHolder(Protocol):
    """A train worker that holds a reference policy, for an algorithm with the column `reference_logprobs`."""

    def snapshot_reference(self) -> None:
        """Makes the current weights the reference policy."""


class AnswerScorer(Protocol):
    """A train worker whose model has a scalar head, for `algorithm: reward_model`."""

    def values(self, batch: Batch, /) -> Batch | None:
        """Returns `values` [rows, tokens]: at each token that of the tokens before it. One worker of a shard gives them."""


class StateOffloader(Protocol):
    """A train worker, critic or teacher that shares its GPU with generation (`policy.generation.colocated`)."""

    def offload(self, parts: tuple[str, ...], /) -> None:
        """Moves `weights`, `gradients` or `optimizer` to host memory, and frees memory that no tensor uses."""

    def reload(self, parts: tuple[str, ...], /) -> None:
        """Moves them back."""

    def device_memory(self) -> DeviceMemory | None:
        """Returns the memory of its GPU; None without one."""


class GenerationWorker(RefitWorker, Protocol):
    """Every generation worker."""

    def abort_requests(self, request_ids: Sequence[int], /) -> int:
        """Drops these requests and returns how many were running."""


class SleepingEngine(Protocol):
    """A generation worker that shares its GPU with training (`policy.generation.colocated`)."""

    def sleep(self, level: int, /) -> int:
        """Frees the KV cache. Level 1 moves the weights to host memory, level 2 drops them. Returns the freed bytes."""

    def wake_up(self, tags: tuple[str, ...], /) -> None:
        """Allocates `weights` or `kv_cache` again."""


class ModelHooks(Protocol):
    """Optional methods of both roles: what a worker knows of its model without being started."""

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json], /) -> None:
        """Raises a UserError for a model that the class cannot hold in this layout. Called before any actor starts."""

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int, /) -> list[WeightSlice]:
        """Returns what `rank` will hold, for a refit plan without a run."""

    def weight_config(self) -> Mapping[str, Json]:
        """Returns the keys of the model's configuration that decide what the worker computes."""


MEGATRON_ALONE = (
    *("use_distributed_optimizer", "activation_checkpointing", "moe_aux_loss_coeff", "cuda_graphs"),
    "distributed_data_parallel_config",
)
"""Keys of `megatron_cfg` that are no part of the layout, which own workers have."""

OPTIONAL_SETTINGS: Mapping[str, Callable[[PolicyConfig], object]] = {
    "peft.enabled": lambda policy: policy.peft.enabled,
    "sequence_packing.enabled": lambda policy: policy.sequence_packing.enabled,
    "router_replay": lambda policy: policy.router_replay,
    "deterministic": lambda policy: policy.deterministic,
    "worker_args": lambda policy: policy.worker_args,
    "optimizer.name": lambda policy: _changed(policy.optimizer, OptimizerConfig(), ("name", "args")),
    "fsdp_cfg": lambda policy: policy.fsdp_cfg != FsdpConfig(),
    "megatron_cfg": lambda policy: _changed(policy.megatron_cfg, MegatronConfig(), MEGATRON_ALONE),
}
"""Settings of `policy` that a train worker class reads only if it names them in `supports`, and whether one is asked for."""


def _changed(section: Section, default: Section, keys: Sequence[str]) -> bool:
    return any(getattr(section, key) != getattr(default, key) for key in keys)


def check_supported(worker: type, policy: PolicyConfig, key: str) -> None:
    """Raises ConfigError, naming the `key` of the class, for a setting that it would ignore."""
    for name, asked in OPTIONAL_SETTINGS.items():
        if asked(policy) and name not in getattr(worker, "supports", ()):
            raise ConfigError(
                f"policy.{name} is set, but {worker.__name__} ({key}) does not support it; remove it, or choose a worker "
                "whose class names it in `supports`"
            )


OPTIONAL = (ModelHooks, CheckpointChecker, LogprobKeeper, CertifiedTrainWorker)
"""Protocols whose methods a worker class may lack."""


def required_protocols(config: Config, plan: RunPlan) -> dict[str, tuple[type, ...]]:
    """Returns the protocols that the worker class of each role must fit in a run of `config`."""
    saving = config.checkpointing
    chosen: dict[type, bool] = {
        RolloutTrainWorker if plan.generates else TrainWorker: True,
        BackgroundSaver: saving.enabled and saving.async_save,
        HuggingFaceExporter: saving.export_hf,
        ReferenceHolder: plan.reference == TRAIN,
        AnswerScorer: gives_scores(planned_algorithm(plan)),
        StateOffloader: plan.colocated,
    }
    generation = (GenerationWorker, *((SleepingEngine,) if plan.colocated else ()))
    turns = {role: (StateOffloader,) if plan.colocated and role in plan.sharing else () for role in plan.model_roles}
    saved = (TrainWorker, *((BackgroundSaver,) if chosen[BackgroundSaver] else ()))
    return {
        "train": tuple(protocol for protocol, needed in chosen.items() if needed),
        "generation": generation,
        **{role: (*(saved if role == CRITIC else ()), *protocols) for role, protocols in turns.items()},
    }
