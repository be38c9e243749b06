"""MegatronBackend: one rank's model on Megatron-Core, with or without a GPU, for `dagrl.workers.train.worker.TrainWorker`.

Heavy imports happen in `prepare` and `setup`, so the driver can import the class to trace phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from dagrl.channels.spec import nccl_environment
from dagrl.config import Config, FsdpConfig, Json, OptimizerConfig, PolicyConfig
from dagrl.config.settings import sends_adapters
from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice, expand
from dagrl.rl.routed_experts import routed_layers
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.architecture import Architecture, check_layout, read_architecture, step_tflop
from dagrl.workers.megatron.groups import end_groups, start_groups
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes, stacked_shapes
from dagrl.workers.train.adapters import (
    check_adapters,
    linear_shapes,
    read_adapters,
    targets,
    trained_adapters,
    write_adapters,
)
from dagrl.workers.train.backend import ModelSpec
from dagrl.workers.train.groups import abort_groups, gather_objects, run_on_all_ranks
from dagrl.workers.train.hf_load import check_hf, has_scalar_head, load_hf

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from dagrl.workers.megatron.lora import Adapters
    from dagrl.workers.megatron.model import ModelChunks
    from dagrl.workers.megatron.trainer import Trainer
    from dagrl.workers.train.checkpoint import Piece
    from dagrl.workers.train.microbatches import RoutedModel
    from dagrl.workers.train.row_plans import ParallelRank


class MegatronBackend:
    """A `Backend`, which documents the methods."""

    shares = True
    checkpoint_format: ClassVar[str] = "dagrl-megatron-4"

    def __init__(self, spec: ModelSpec) -> None:
        self.context, self.config, self._spec = spec.context, spec.config, spec
        self.captures = spec.config.policy.megatron_cfg.cuda_graphs
        self._trainer: Trainer | None = None
        self.adapters: Adapters | None = None

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        architecture, layout = read_architecture(hf_config), config.policy.megatron_cfg.layout
        check_layout(hf_config, layout)
        for conflict in _conflicts(config.policy, architecture):
            raise ConfigError(conflict)
        if config.policy.router_replay:
            routed_layers(hf_config)
        shapes = parameter_shapes(hf_config)
        if config.policy.peft.enabled:
            check_adapters(config.policy.peft, linear_shapes(shapes))
        if config.policy.model_name is not None:
            check_hf(config.policy.model_name, shapes)

    @staticmethod
    def computed(hf_config: Mapping[str, Json]) -> dict[str, Json]:
        """Returns the architecture that a `config.json` describes."""
        return read_architecture(hf_config).computed

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        weights = megatron_weight_slices(hf_config, layout, rank)
        if sends_adapters(config):
            peft = config.policy.peft
            return trained_adapters(weights, targets(linear_shapes(stacked_shapes(hf_config)), peft), peft)
        return weights

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **nccl_environment()}

    @staticmethod
    def prepare() -> None:
        from dagrl.workers.megatron import cpu

        cpu.adapt()
        import dagrl.workers.megatron.model
        import dagrl.workers.megatron.trainer  # noqa: F401

    def setup(self, address: str) -> None:
        self.prepare()
        from dagrl.workers.megatron.experts import check_grouped_kernel
        from dagrl.workers.megatron.trainer import frozen_trainer, make_trainer
        from dagrl.workers.train.optimizer import OptimizerSteps

        spec, config, layout = self._spec, self.config, self.context.layout
        check_layout(spec.hf_config, layout)
        if self.captures and spec.device.type == "cpu":
            raise ConfigError("policy.megatron_cfg.cuda_graphs is true, and this worker has no GPU; set it to false")
        start_groups(self.context, address, config.seed)
        architecture = read_architecture(spec.hf_config)
        if self.captures and architecture.experts:
            check_grouped_kernel()
        model = self._load(spec.source, spec.hf_config)
        if architecture.scalar and not has_scalar_head(spec.source):
            deviation = spec.hf_config.get("initializer_range", 0.02)
            model.init_scalar_head(float(cast(float, deviation)), config.seed)
        self.adapters = self._make_adapters(model)
        if spec.trains:
            self._trainer = make_trainer(model, OptimizerSteps(config), config, layout)
        else:
            self._trainer = frozen_trainer(model, config, layout)

    def abort(self) -> None:
        if self._trainer is not None:
            self._trainer.forget_recordings()  # NCCL cannot end a communicator that a graph refers to
        abort_groups()

    def shutdown(self) -> None:
        if self._trainer is not None:
            self._trainer.forget_recordings()
            self._trainer.model.forget_microbatches()
        self._trainer = self.adapters = None
        end_groups()

    @property
    def trainer(self) -> Trainer:
        """The model, its passes and its optimizer."""
        assert self._trainer is not None, "`setup` makes it"
        return self._trainer

    model = trainer

    @property
    def place(self) -> ParallelRank:
        from megatron.core import parallel_state

        from dagrl.workers.train.row_plans import ParallelRank

        groups = parallel_state.get_context_parallel_group(), parallel_state.get_data_parallel_group()
        return ParallelRank(self.context.layout, self.context.coordinates, *groups, self._spec.device)

    @property
    def routed(self) -> RoutedModel | None:
        from dagrl.workers.train.microbatches import RoutedModel

        model = self.trainer.model.architecture
        return None if model.record is None else RoutedModel(model.vocabulary, model.record)

    def train_tflop(self, lengths: Iterable[int]) -> float:
        return step_tflop(self.trainer.model.architecture, lengths)

    # ---- state

    def base_model(self) -> AbstractContextManager[None] | None:
        return None if self.adapters is None else self.adapters.disabled()

    def _load(self, directory: Path, hf_config: Mapping[str, Json]) -> ModelChunks:
        """Builds this rank's part of a model and fills it from a Hugging Face directory."""
        from dagrl.workers.megatron.model import build_model

        layout = self.context.layout
        model = build_model(read_architecture(hf_config), self.config.policy, layout, self._spec.device)
        slices = megatron_weight_slices(hf_config, layout, self.context.rank)
        load_hf(directory, slices, parameter_shapes(hf_config), model.tensors())
        return model

    # ---- refits

    def weight_slices(self) -> list[WeightSlice]:
        return self.describe(self.config, self._spec.hf_config, self.context.layout, self.context.rank)

    def sent_tensors(self) -> dict[str, Tensor]:
        if self.adapters is not None and sends_adapters(self.config):
            return self.adapters.sent()
        return self.trainer.weights()

    def sending(self) -> AbstractContextManager[None]:
        if self.adapters is not None and sends_adapters(self.config):
            self.adapters.scale_sent()
            return nullcontext()
        return self._merged()

    # ---- files

    def pieces_to_save(self, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
        from dagrl.workers.megatron.sharding import pieces_to_save

        return pieces_to_save(self.trainer, reference)

    def pieces_to_load(self, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
        from dagrl.workers.megatron.sharding import pieces_to_load

        return pieces_to_load(self.trainer, reference)

    def export_hf(self, directory: str, group: ProcessGroup | None) -> None:
        """Writes the model with merged weights, and any adapters in PEFT's format."""
        from dagrl.workers.train.hf_export import export_hf

        slices = [self.slices_of(rank) for rank in range(self.context.layout.world_size)]
        with self._merged():
            tensors, precision = self.trainer.model.tensors(), self.config.policy.precision
            export_hf(self._spec.source, directory, slices, tensors, self.context.rank, group, precision)
            self._export_adapters(Path(directory) / "adapter", slices, group)

    def _export_adapters(self, directory: Path, slices: list[list[WeightSlice]], group: ProcessGroup | None) -> None:
        """Writes the adapters in PEFT's format. The first rank with a part of a parameter gives its adapter."""
        if self.adapters is None:
            return
        assert group is not None, "Megatron has made groups"
        owners = {piece.name: rank for rank, pieces in reversed(list(enumerate(slices))) for piece in expand(pieces)}
        own = {
            name: [part.detach().cpu() for part in adapter]
            for name, adapter in self.adapters.held.items()
            if owners[name] == self.context.rank
        }
        adapters = {name: adapter for part in gather_objects(group, own) for name, adapter in part.items()}
        settings, base = self.config.policy.peft, str(self._spec.source.absolute())
        write = self.context.rank == 0
        run_on_all_ranks(group, lambda: write_adapters(directory, base, settings, adapters) if write else None)

    def _merged(self) -> AbstractContextManager[None]:
        """Returns a context in which the model's parameters include any adapters."""
        return nullcontext() if self.adapters is None else self.adapters.merged()

    def slices_of(self, rank: int) -> list[WeightSlice]:
        """Returns the parts of a checkpoint that a rank holds."""
        return megatron_weight_slices(self._spec.hf_config, self.context.layout, rank)

    def _make_adapters(self, model: ModelChunks) -> Adapters | None:
        import torch

        from dagrl.workers.megatron.lora import add_adapters

        settings = self.config.policy.peft
        if not settings.enabled:
            return None
        layout, place = self.context.layout, self.context.coordinates
        siblings = [
            self.slices_of(rank)
            for rank in range(layout.world_size)
            if replace(layout.coordinates(rank), tp=place.tp, etp=place.etp, ep=place.ep, edp=place.edp) == place
        ]
        own, shapes = self.slices_of(self.context.rank), parameter_shapes(self._spec.hf_config)
        adapters = add_adapters(model, own, siblings, shapes, settings, self.config.seed)
        if settings.adapter_path is not None:
            with torch.no_grad():
                read_adapters(settings.adapter_path, adapters.held)
        return adapters


def _conflicts(policy: PolicyConfig, model: Architecture) -> Iterator[str]:
    """Yields an error for each pair of settings that exclude each other, or that need experts the model does not have."""
    key, megatron, has_adapters = "policy.megatron_cfg", policy.megatron_cfg, policy.peft.enabled
    if model.full_tokens is not None and policy.max_total_sequence_length > model.full_tokens:
        yield (
            f"policy.max_total_sequence_length is {policy.max_total_sequence_length}, but the model has other frequencies "
            f"(longrope, dynamic) or a Llama's sliding window beyond {model.full_tokens} tokens, which the Megatron worker "
            f"lacks; set it to at most {model.full_tokens}, or policy.backend=fsdp"
        )
    if megatron.cuda_graphs and any(window and window < policy.max_total_sequence_length for window in model.windows):
        yield (
            f"{key}.cuda_graphs is true, and attention with sliding windows shorter than policy.max_total_sequence_length "
            "computes one sequence after another; set it to false"
        )
    if (policy.optimizer.name, policy.optimizer.args) != (OptimizerConfig().name, {}):
        yield "policy.optimizer.name or args is set, but Megatron has AdamW alone; leave it out, or set policy.backend=fsdp"
    if policy.fsdp_cfg != FsdpConfig():
        yield "policy.fsdp_cfg has keys of its own, which policy.backend megatron does not read; set policy.backend=fsdp"
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
    if has_adapters and policy.peft.target_parameters:
        yield "policy.peft.target_parameters is set, but Megatron gives experts no adapters; set policy.backend=fsdp"
    if megatron.cuda_graphs and has_adapters:
        text = "recorded microbatches leave out adapters; set one of them to false"
        yield f"{key}.cuda_graphs is true, and peft.enabled: {text}"
    if megatron.moe_aux_loss_coeff and not model.experts:
        yield f"{key}.moe_aux_loss_coeff is set, but the model has no experts; set it to 0"
