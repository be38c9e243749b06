"""MegatronWorkerBase: the lifecycle of a train worker: checks, setup, process groups, abort and shutdown.

`MegatronWorker` adds the phases. Heavy imports happen in `setup`, so the driver can import the class to trace phases.
"""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dagrl.channels import Channel
from dagrl.channels.nccl import nccl_environment
from dagrl.config import Config, Json, PolicyConfig
from dagrl.config.settings import has_fp8_kv_cache, sends_adapters
from dagrl.errors import ConfigError, RunError, UserError
from dagrl.refit import RefitSender
from dagrl.refit.slices import WeightSlice
from dagrl.rl.routed_experts import routed_layers
from dagrl.runtime.garbage import gc_paused
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.start_parts import StartParts
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.families.kv_scales import megatron_kv_scales
from dagrl.workers.megatron import cpu
from dagrl.workers.megatron.adapter_files import check_adapters, read_adapters
from dagrl.workers.megatron.adapter_slices import targets, trained_adapters
from dagrl.workers.megatron.architecture import Architecture, check_layout, read_architecture
from dagrl.workers.megatron.groups import abort_groups, end_groups, start_checkpoint_group, start_groups
from dagrl.workers.megatron.hf_load import ParameterShapes, check_hf, has_scalar_head, load_hf, read_hf_config
from dagrl.workers.megatron.identity import identity_of, read_worker_file
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes, stacked_shapes
from dagrl.workers.train.kept_logprobs import KeptLogprobs

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from dagrl.workers.megatron.kv_scales import KvScales
    from dagrl.workers.megatron.lora import Adapters
    from dagrl.workers.megatron.model import ModelChunks
    from dagrl.workers.megatron.reference import ReferenceModel, ReferencePolicy
    from dagrl.workers.megatron.trainer import Trainer
    from dagrl.workers.train.checkpoint import Saving
    from dagrl.workers.train.offload import StatePart


class MegatronWorkerBase:
    """Holds one rank's part of the policy, by `context.layout`. `config.policy.model_name` is a Hugging Face directory."""

    requires = ("megatron",)
    trains = True
    """Whether the model has gradients and an optimizer."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context = context
        self.config = config
        self._hf_config: Mapping[str, Json] = {}
        self._trainer: Trainer | None = None
        self._reference: ReferencePolicy | None = None
        self._reference_model: ReferenceModel | None = None
        self._adapters: Adapters | None = None
        self._sender: RefitSender | None = None
        self._channel: Channel | None = None
        self._saving: Saving | None = None
        self._checkpoint_group: ProcessGroup | None = None
        self._aborted = False
        self._sending = False
        self._kv_scales: KvScales | None = None
        self._kept = KeptLogprobs()
        self.start_parts = StartParts()
        self._warm_widths: dict[str, set[int]] = {}  # widths of packed microbatches, by phase
        self._stream: torch.cuda.Stream | None = None  # None: the default stream
        self._limited = False  # by `limit_memory`
        self._exceeded = False  # the limit; no peer waits for this worker

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raises a UserError before any actor starts if the model cannot be loaded, or not trained in this layout."""
        check_layout(hf_config, config.policy.megatron_cfg.layout)
        for conflict in _conflicts(config.policy, read_architecture(hf_config)):
            raise ConfigError(conflict)
        if config.policy.reference_model_name is not None:
            _check_reference_model(config.policy.reference_model_name, config.policy.megatron_cfg.layout)
        if config.policy.router_replay:
            routed_layers(hf_config)
        shapes = parameter_shapes(hf_config)
        if config.policy.megatron_cfg.peft.enabled:
            check_adapters(config.policy.megatron_cfg.peft, shapes)
        if config.policy.model_name is not None:
            check_hf(config.policy.model_name, shapes)

    @classmethod
    def check_checkpoint(cls, config: Config, hf_config: Mapping[str, Json], directory: str) -> None:
        """Raises CheckpointError if the model, its precision or its adapters differ from those of a checkpoint."""
        read_worker_file(Path(directory), identity_of(config.policy, cls.model_config(hf_config)))

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        """Returns what `rank` of `layout` will hold, without a worker."""
        weights = megatron_weight_slices(hf_config, layout, rank)
        if sends_adapters(config):
            peft = config.policy.megatron_cfg.peft
            return trained_adapters(weights, targets(stacked_shapes(hf_config), peft), peft)
        return [*weights, *(megatron_kv_scales(hf_config, layout, rank) if has_fp8_kv_cache(config) else ())]

    @staticmethod
    def model_config(hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        """Returns the configuration of the model that the class builds from a checkpoint with this `config.json`."""
        return hf_config

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        """Returns environment variables that must be set before torch is imported."""
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # workers share the cores of a host
        cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if config.policy.deterministic else {}  # as torch requires
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": threads, **cublas, **nccl_environment()}

    def prepare(self) -> None:
        """Imports Megatron-Core."""
        with warnings.catch_warnings(), gc_paused(), self.start_parts.part("imports"):
            warnings.simplefilter("ignore")  # Megatron warns of every missing optional extension
            cpu.adapt()
            import dagrl.workers.megatron.model
            import dagrl.workers.megatron.trainer  # noqa: F401

    def setup(self, address: str) -> None:
        """Joins the group at `address`, builds this rank's part of the model and loads its weights.

        On failure it frees groups and memory before raising, so the worker can be set up again.
        """
        self._hf_config = self.model_config(read_hf_config(self._source))
        check_layout(self._hf_config, self.context.layout)
        if self.config.policy.megatron_cfg.cuda_graphs and self._device.type == "cpu":
            raise ConfigError("policy.megatron_cfg.cuda_graphs is true, and this worker has no GPU; set it to false")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of every missing optional extension
            try:
                self._trainer = self._build(address)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # frames hold the model, and with it groups and threads
                self.shutdown()
                raise

    def _build(self, address: str) -> Trainer:
        import torch

        cpu.adapt()
        from dagrl.workers.megatron.experts import check_grouped_kernel
        from dagrl.workers.megatron.model import build_model
        from dagrl.workers.megatron.trainer import frozen_trainer, make_trainer

        torch.use_deterministic_algorithms(self.config.policy.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time
        gc.freeze()  # full collections skip all imports; they run at different times on each worker
        with self._running():
            with self.start_parts.part("process groups"):
                start_groups(self.context, address, self.config.seed)
                self._checkpoint_group = start_checkpoint_group(self.config.timeouts.checkpoint_s)
            architecture = read_architecture(self._hf_config)
            if self.config.policy.megatron_cfg.cuda_graphs and architecture.experts:
                check_grouped_kernel()
            with self.start_parts.part("model and weights"):
                model = build_model(architecture, self.config.policy, self.context.layout, self._device)
                shapes = parameter_shapes(self._hf_config)
                load_hf(self._source, self._slices_of(self.context.rank), shapes, model.tensors())
            if architecture.scalar and not has_scalar_head(self._source):
                deviation = self._hf_config.get("initializer_range", 0.02)
                model.init_scalar_head(float(cast(float, deviation)), self.config.seed)
            self._adapters = self._make_adapters(model, shapes)
            self._kv_scales = self._make_kv_scales(model)
            with self.start_parts.part("optimizer"):
                return (make_trainer if self.trains else frozen_trainer)(model, self.config, self.context.layout)

    def abort(self) -> None:
        """Aborts this worker's collectives and channel, so that peers waiting for it raise."""
        if self._channel is not None:
            self._channel.abort(f"train worker {self.context.rank} was aborted")
        if self._sending:  # no peer waits in Megatron's groups; training can continue, refits with a new channel
            return
        if self._exceeded:  # and another warm-up follows
            return
        self._aborted = True
        if self._trainer is not None:
            self._trainer.forget_recordings()  # NCCL cannot end a communicator that a graph refers to
        abort_groups()

    def reset(self) -> bool:
        """Leaves the groups, drops the model and forgets everything. False after NCCL was aborted: see `abort_groups`."""
        reusable = not (self._aborted and self._device.type == "cuda")
        self.shutdown()
        type(self).__init__(self, self.context, self.config)
        return reusable

    def shutdown(self) -> None:
        """Leaves the groups and drops the model."""
        if self._channel is not None:
            self._channel.close()
        if self._trainer is not None:
            self._trainer.forget_recordings()
            self._trainer.model.forget_microbatches()
        self._trainer = self._sender = self._channel = self._reference = self._saving = None
        self._checkpoint_group = self._kv_scales = self._reference_model = self._adapters = None
        end_groups()

    def _ready(self, *needs: StatePart) -> Trainer:
        """Returns the trainer. Raises RunError if the worker cannot run, or a needed part of the state is offloaded."""
        if self._trainer is None:
            raise RunError("the worker is not set up; call setup(address) on all workers of the group first")
        self._check_aborted()
        if needs:
            self._trainer.offloader.require(needs, f"train worker {self.context.rank}")
        return self._trainer

    @contextmanager
    def _running(self, *, training: bool = False) -> Iterator[None]:
        """Context in which a phase runs: sets the thread's CUDA device and stream, and waits for the launched work.

        Waiting attributes a failure to its phase. It does not cover copies of offloaded state, which have their own stream.
        Aborted NCCL collectives end without raising, so the abort is checked afterwards. `training` leaves
        an overlapped parameter gathering to the forward pass; other phases complete it first. With `cuda_graphs` everything
        runs on the worker's own stream, as capture requires.
        """
        import torch

        self._sending = False
        if torch.cuda.is_available():
            torch.cuda.set_device(self._device)
            if self.config.policy.megatron_cfg.cuda_graphs and self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                if self._trainer is not None and not training:
                    self._trainer.finish_param_gather()
                yield
                if torch.cuda.is_available():
                    torch.cuda.current_stream().synchronize()
        except torch.OutOfMemoryError:
            self._exceeded = self._limited
            raise
        self._check_aborted()
        self._sending = False

    def _check_aborted(self) -> None:
        if self._aborted:
            raise RunError(f"train worker {self.context.rank} was aborted; restart the group")

    @property
    def _device(self) -> torch.device:
        """This worker's device. With several visible GPUs: `LOCAL_RANK`, otherwise by rank."""
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        visible = torch.cuda.device_count()
        local = self.context.rank if visible > 1 else 0
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", local)) % visible)

    @property
    def _source(self) -> Path:
        if self.config.policy.model_name is None:
            raise ConfigError("policy.model_name is not set; the worker needs a Hugging Face directory")
        return Path(self.config.policy.model_name)

    def _slices_of(self, rank: int) -> list[WeightSlice]:
        """Returns the parts of a checkpoint that a rank holds."""
        return megatron_weight_slices(self._hf_config, self.context.layout, rank)

    def _make_adapters(self, model: ModelChunks, shapes: ParameterShapes) -> Adapters | None:
        import torch

        from dagrl.workers.megatron.lora import add_adapters

        settings = self.config.policy.megatron_cfg.peft
        if not settings.enabled:
            return None
        layout, place = self.context.layout, self.context.coordinates
        siblings = [
            self._slices_of(rank)
            for rank in range(layout.world_size)
            if replace(layout.coordinates(rank), tp=place.tp, etp=place.etp, ep=place.ep, edp=place.edp) == place
        ]
        own = self._slices_of(self.context.rank)
        adapters = add_adapters(model, own, siblings, shapes, settings, self.config.seed)
        if settings.adapter_path is not None:
            with torch.no_grad():
                read_adapters(settings.adapter_path, adapters.held)
        return adapters

    def _make_kv_scales(self, model: ModelChunks) -> KvScales | None:
        from dagrl.workers.megatron.kv_scales import KvScales

        if not has_fp8_kv_cache(self.config):
            return None
        layers = model.architecture.layers
        return KvScales(model.chunks, layers, self.context.layout, self.context.coordinates, self._device)

    @property
    def _files_group(self) -> ProcessGroup:
        """The group in which workers wait for each other's files."""
        assert self._checkpoint_group is not None, "`setup` creates it"
        return self._checkpoint_group


def _conflicts(policy: PolicyConfig, model: Architecture) -> Iterator[str]:
    """Yields what is wrong with settings that exclude each other, and with those of experts that the model does not have."""
    key, megatron, has_adapters = "policy.megatron_cfg", policy.megatron_cfg, policy.megatron_cfg.peft.enabled
    recorded = f"{key}.cuda_graphs is true, and the model has experts"
    if megatron.cuda_graphs and model.experts and (megatron.layout.ep > 1 or megatron.layout.expert_tp > 1):
        yield (
            f"{recorded} on several workers, whose hosts read how many tokens each expert has while the step runs. Set "
            "cuda_graphs=false, or expert_model_parallel_size=1 and expert_tensor_parallel_size=1"
        )
    if megatron.cuda_graphs and model.experts and policy.precision != "bfloat16":
        yield (
            f"{recorded} in {policy.precision}, where torch multiplies one expert at a time; set cuda_graphs=false, or "
            "policy.precision=bfloat16"
        )
    if megatron.cuda_graphs and has_adapters:
        text = "recorded microbatches leave out adapters; set one of them to false"
        yield f"{key}.cuda_graphs is true, and peft.enabled: {text}"
    gather = f"{key}.distributed_data_parallel_config.overlap_param_gather is true"
    gathers = megatron.distributed_data_parallel_config.overlap_param_gather
    if gathers and model.experts:
        text = "grouped expert products read weights without calling the modules that wait for them. Set it to false"
        yield f"{gather}, and the model has experts: {text}"
    if gathers and has_adapters:
        yield f"{gather}, and peft.enabled: adapters are too small to gather in parts; set overlap_param_gather=false"
    if (megatron.moe_aux_loss_coeff or megatron.moe_z_loss_coeff) and not model.experts:
        yield f"{key}.moe_aux_loss_coeff or moe_z_loss_coeff is set, but the model has no experts; set both to 0"
    rate = f"{key}.moe_router_bias_update_rate is {megatron.moe_router_bias_update_rate:g}"
    if megatron.moe_router_bias_update_rate and not model.expert_bias:
        yield f"{rate}, but routers of {model.model_type} models have no expert bias (glm4_moe has); set it to 0"
    if megatron.moe_router_bias_update_rate and has_adapters:
        yield f"{rate}, and peft.enabled: LoRA leaves the base model, with its expert biases, as it is; set the rate to 0"


def _check_reference_model(directory: str, layout: ParallelLayout) -> None:
    """Raises a UserError if the model cannot be loaded in this layout."""
    try:
        hf_config = read_hf_config(directory)
        check_layout(hf_config, layout)
        check_hf(directory, parameter_shapes(hf_config))
    except UserError as error:
        raise type(error)(f"policy.reference_model_name: {error}") from error
