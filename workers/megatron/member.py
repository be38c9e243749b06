"""GroupMember: what every train worker is besides its work: how it joins its group, what it holds, how it is stopped.

The base of `MegatronWorker`. Heavy imports happen in `setup`, so that the driver can import the class to trace phases.
"""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.channels.nccl import nccl_environment
from dagrl.config import Config, Json
from dagrl.config.settings import has_fp8_kv_cache
from dagrl.errors import ConfigError, RunError
from dagrl.layout import ParallelLayout
from dagrl.refit.slices import WeightSlice
from dagrl.worker import WorkerContext
from workers.megatron.accumulated import Accumulated
from workers.megatron.architecture import check_layout, read_architecture

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from dagrl.channels.base import Channel
    from dagrl.refit.run import RefitSender
    from workers.megatron.checkpoint import Saving
    from workers.megatron.kv_scales import KvScales
    from workers.megatron.model import Model
    from workers.megatron.offload import Part
    from workers.megatron.optimizer import Trainer
    from workers.megatron.reference import ReferencePolicy


class GroupMember:
    """Holds one rank's part of the policy; `context.layout` says which. `config.policy.model_name` is a HF directory."""

    requires = ("megatron",)

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context = context
        self.config = config
        self._hf_config: Mapping[str, Json] = {}
        self._trainer: Trainer | None = None
        self._reference: ReferencePolicy | None = None
        self._sender: RefitSender | None = None
        self._channel: Channel | None = None
        self._saving: Saving | None = None
        self._checkpoint_group: ProcessGroup | None = None
        self._aborted = False
        self._sending = False
        self._kv_scales: KvScales | None = None
        self._accumulated = Accumulated()
        self._warm_widths: dict[str, set[int]] = {}  # of packed microbatches, by phase
        self._stream: torch.cuda.Stream | None = None  # None: the default one

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raise a UserError, before any actor starts, for a model that cannot be loaded, or not trained in this layout."""
        from workers.megatron.hf import check_hf
        from workers.megatron.weights import parameter_shapes

        check_layout(hf_config, config.policy.megatron_cfg.layout)
        if config.policy.megatron_cfg.cuda_graphs and read_architecture(hf_config).experts:
            raise ConfigError(
                "policy.megatron_cfg.cuda_graphs is true, and the model has experts: how many tokens each gets is known to "
                "the host only while the step runs; set cuda_graphs=false"
            )
        if config.policy.model_name is not None:
            check_hf(config.policy.model_name, parameter_shapes(hf_config))

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        """What `rank` of `layout` will hold, without a worker."""
        from workers.families.kv_scales import megatron_kv_scales
        from workers.megatron.weights import megatron_weight_slices

        weights = megatron_weight_slices(hf_config, layout, rank)
        return [*weights, *(megatron_kv_scales(hf_config, layout, rank) if has_fp8_kv_cache(config) else ())]

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        """Variables that must stand before torch is imported."""
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # workers share the cores of a host
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": threads, **nccl_environment()}

    def setup(self, address: str) -> None:
        """Join the group at `address`, build this rank's part of the model and load its weights.

        When that fails, groups and memory are given back before the error is raised: the worker can be set up again.
        """
        from workers.megatron.hf import read_hf_config

        self._hf_config = read_hf_config(self._source)
        check_layout(self._hf_config, self.context.layout)
        if self.config.policy.megatron_cfg.cuda_graphs and self._device.type == "cpu":
            raise ConfigError("policy.megatron_cfg.cuda_graphs is true, and this worker has no GPU; set it to false")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of every optional extension that is absent
            try:
                self._trainer = self._build(address)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold the model, and with it the groups and their threads
                self.shutdown()
                raise

    def _build(self, address: str) -> Trainer:
        from workers.megatron import cpu

        cpu.adapt()
        from workers.megatron.groups import start_checkpoint_group, start_groups
        from workers.megatron.hf import load_hf
        from workers.megatron.model import build_model
        from workers.megatron.optimizer import make_trainer
        from workers.megatron.weights import parameter_shapes

        gc.freeze()  # full collections, which come at other times on other workers, pass over all that was imported
        with self._running():
            start_groups(self.context, address, self.config.seed)
            self._checkpoint_group = start_checkpoint_group(self.config.timeouts.checkpoint_s)
            architecture = read_architecture(self._hf_config)
            model = build_model(architecture, self.config.policy, self.context.layout, self._device)
            shapes = parameter_shapes(self._hf_config)
            load_hf(self._source, self._slices_of(self.context.rank), shapes, model.tensors())
            self._kv_scales = self._make_kv_scales(model)
            return make_trainer(model, self.config, self.context.layout)

    def abort(self) -> None:
        """Break this worker's collectives and channel, so that peers that wait for it raise."""
        from workers.megatron.groups import abort_groups

        if self._channel is not None:
            self._channel.abort(f"train worker {self.context.rank} was aborted")
        if self._sending:  # no peer waits in Megatron's groups: training goes on, with a new channel so do refits
            return
        self._aborted = True
        if self._trainer is not None:
            self._trainer.forget_recordings()  # NCCL ends no communicator that a graph refers to
        abort_groups()

    def shutdown(self) -> None:
        """Leave the groups and drop the model."""
        from workers.megatron.groups import end_groups

        if self._channel is not None:
            self._channel.close()
        if self._trainer is not None:
            self._trainer.forget_recordings()
            self._trainer.model.forget_microbatches()
        self._trainer = self._sender = self._channel = self._reference = self._saving = None
        self._checkpoint_group = self._kv_scales = None
        end_groups()

    def _ready(self, *needs: Part) -> Trainer:
        """The trainer; RunError when the worker cannot run, or a part of the state that is needed is offloaded."""
        if self._trainer is None:
            raise RunError("the worker is not set up; call setup(address) on all workers of the group first")
        self._check_standing()
        if needs:
            self._trainer.offloader.require(needs, f"train worker {self.context.rank}")
        return self._trainer

    @contextmanager
    def _running(self, *, sending: bool = False) -> Iterator[None]:
        """A phase may run on any thread, and CUDA's current device is the thread's own.

        An abort may come when a phase has failed already: until the next begins, `sending` says that it was a refit.
        What was launched is waited for, so that a failure belongs to the phase that it happened in; copies of offloaded
        state, on a stream of their own, are not. NCCL's collectives do not raise when they are aborted, they end: what they
        gave must not be used. With `cuda_graphs` all of it is on a stream of the worker's own, as they ask for.
        """
        import torch

        self._sending = sending
        if torch.cuda.is_available():
            torch.cuda.set_device(self._device)
            if self.config.policy.megatron_cfg.cuda_graphs and self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        self._check_standing()
        self._sending = False

    def _check_standing(self) -> None:
        if self._aborted:
            raise RunError(f"train worker {self.context.rank} was aborted; restart the group")

    @property
    def _device(self) -> torch.device:
        """This worker's device; of several visible GPUs the one that `LOCAL_RANK` names, else they are dealt by rank."""
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
        """What a rank holds of a checkpoint."""
        from workers.megatron.weights import megatron_weight_slices

        return megatron_weight_slices(self._hf_config, self.context.layout, rank)

    def _make_kv_scales(self, model: Model) -> KvScales | None:
        from workers.megatron.kv_scales import KvScales

        if not has_fp8_kv_cache(self.config):
            return None
        layers = model.architecture.layers
        return KvScales(model.chunks, layers, self.context.layout, self.context.coordinates, self._device)

    @property
    def _files_group(self) -> ProcessGroup:
        """Where workers wait for each other's files."""
        assert self._checkpoint_group is not None, "`setup` makes it"
        return self._checkpoint_group
