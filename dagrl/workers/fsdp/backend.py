"""FsdpBackend: one rank's transformers model under FSDP2, with or without a GPU, for `TrainWorker`.

Heavy imports happen in `prepare` and `setup`, so the driver can import the class to trace phases.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dagrl.channels.spec import nccl_environment
from dagrl.config import Config, Json, PolicyConfig
from dagrl.config.settings import casts_as_packed, least_shared, sends_adapters
from dagrl.errors import ConfigError
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCALAR_HEAD, model_keys
from dagrl.workers.fsdp.architecture import find_config, has_own_code
from dagrl.workers.fsdp.checks import check_model, routed_experts
from dagrl.workers.train.adapters import write_adapters
from dagrl.workers.train.backend import ModelSpec
from dagrl.workers.train.groups import abort_groups, gather_objects, join_group, leave_group, run_on_all_ranks
from dagrl.workers.train.hf_load import has_scalar_head

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from dagrl.workers.fsdp.lora import Adapters
    from dagrl.workers.fsdp.model import HiddenStates, Meshes
    from dagrl.workers.fsdp.sent import SentAdapters, SentWeights
    from dagrl.workers.fsdp.trainer import ShardedModel
    from dagrl.workers.train.checkpoint import Piece
    from dagrl.workers.train.microbatches import RoutedModel
    from dagrl.workers.train.row_plans import ParallelRank

logger = logging.getLogger(__name__)


class FsdpBackend:
    """A `Backend`, which documents the methods."""

    captures = False
    shares = True
    checkpoint_format: ClassVar[str] = "dagrl-fsdp-1"

    def __init__(self, spec: ModelSpec) -> None:
        self._spec, self._policy = spec, spec.config.policy
        self._model: ShardedModel | None = None
        self._meshes: Meshes | None = None
        self._adapters: Adapters | None = None
        self._sent: SentWeights | SentAdapters | None = None

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        check_model(config, hf_config)

    @staticmethod
    def computed(hf_config: Mapping[str, Json]) -> dict[str, Json]:
        """Returns all settings that affect the computation, with transformers' defaults if it has the model."""
        keys = dict(hf_config)
        if not has_own_code(hf_config):
            keys = model_keys(find_config(PolicyConfig(), hf_config, scalar=SCALAR_HEAD in hf_config).to_dict())
        return _without_ends(keys)

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        from dagrl.workers.fsdp.dry import dry_model
        from dagrl.workers.fsdp.lora import Adapters
        from dagrl.workers.fsdp.sent import sent_slices

        with dry_model(config.policy, hf_config, layout, rank) as root:
            if sends_adapters(config):
                return Adapters(root.net, config.policy.peft).sent_slices()
            return sent_slices(root.net, config.policy.precision)

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        return nccl_environment()

    @staticmethod
    def prepare() -> None:
        import dagrl.workers.fsdp.trainer  # noqa: F401

    def setup(self, address: str) -> None:
        import torch

        from dagrl.workers.fsdp.lora import Adapters
        from dagrl.workers.fsdp.media import make_media_inputs
        from dagrl.workers.fsdp.model import Meshes, check_context, init_scalar_head, load_model
        from dagrl.workers.fsdp.separation import check_separation
        from dagrl.workers.fsdp.trainer import ShardedModel

        spec = self._spec
        if spec.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # else a mesh would choose the device
        join_group(spec.context, address)
        torch.manual_seed(spec.config.seed)
        self._meshes = Meshes.of(spec.context.layout, self._policy.fsdp_cfg.data_parallel_replicas, spec.device)
        root = load_model(spec.source, self._policy, self._meshes, spec.device, scalar=spec.scalar, trains=spec.trains)
        if spec.scalar and not has_scalar_head(spec.source):
            init_scalar_head(root, spec.config.seed)
        if spec.trains and self._policy.peft.enabled:
            self._adapters = Adapters(root.net, self._policy.peft)
            self._adapters.fill(spec.config.seed)
        if spec.config.data.images.enabled:
            root.media = make_media_inputs(root.net, spec.config)
        packed = self._policy.sequence_packing.enabled
        if packed:
            check_separation(root, spec.device)
        if least_shared(self._policy) is not None:
            self._check_sharing(root)
        check_context(root, spec.device, packed=packed)
        routed = routed_experts(spec.config, spec.hf_config)
        self._model = ShardedModel(root, spec.config, spec.device, routed, trains=spec.trains)

    def _check_sharing(self, root: HiddenStates) -> None:
        """Sets `shares`. Raises ConfigError if prefixes cannot be shared, but must be."""
        from dagrl.workers.fsdp.separation import shares_prefixes

        self.shares, name = shares_prefixes(root, self._spec.device), type(root.net).__name__
        if not self.shares and self._policy.sequence_packing.shared_prefix is True:
            raise ConfigError(
                f"policy.sequence_packing.shared_prefix is true, but sequences of {name} do not see a prefix that they "
                "share as their own; set it to auto, or false"
            )
        if not self.shares and self._spec.context.rank == 0:
            logger.warning(
                "microbatches repeat shared prefixes: sequences of %s do not see one as their own. "
                "policy.sequence_packing.shared_prefix=false leaves out this trial",
                name,
            )

    def abort(self) -> None:
        abort_groups()

    def shutdown(self) -> None:
        from dagrl.workers.fsdp.model import forget_meshes

        self._model = self._meshes = self._adapters = self._sent = None
        forget_meshes()
        leave_group()

    # ---- computing

    @property
    def model(self) -> ShardedModel:
        assert self._model is not None, "`setup` makes it"
        return self._model

    @property
    def place(self) -> ParallelRank:
        from dagrl.workers.train.row_plans import ParallelRank

        context = self._spec.context
        assert self._meshes is not None, "`setup` makes it"
        groups = self._meshes.context, self._meshes.data
        return ParallelRank(context.layout, context.coordinates, *groups, self._spec.device)

    @property
    def routed(self) -> RoutedModel | None:
        """Sizes of the experts, if they are replayed or balanced."""
        from dagrl.workers.train.microbatches import RoutedModel

        sizes = routed_experts(self._spec.config, self._spec.hf_config)
        return None if sizes is None else RoutedModel(self.model.net.config.get_text_config().vocab_size, sizes, True)

    def train_tflop(self, lengths: Iterable[int]) -> float:
        return self.model.train_tflop(lengths)

    # ---- state

    def base_model(self) -> AbstractContextManager[None] | None:
        return None if self._adapters is None else self._adapters.disabled()

    # ---- refits

    def weight_slices(self) -> list[WeightSlice]:
        return self.sent.slices

    def sent_tensors(self) -> Mapping[str, Tensor]:
        return self.sent.tensors

    @contextmanager
    def sending(self) -> Iterator[None]:
        self.sent.update()
        yield

    @property
    def sent(self) -> SentWeights | SentAdapters:
        """What a refit sends. Made when first asked for, as a run may have no refits."""
        from dagrl.workers.fsdp.sent import SentAdapters

        if self._sent is None and self._adapters is not None and sends_adapters(self._spec.config):
            self._sent = SentAdapters(self._adapters, self._policy.precision, self._spec.device)
        elif self._sent is None:
            self._sent = self._weights_to_send()
        return self._sent

    def _weights_to_send(self) -> SentWeights:
        from dagrl.workers.fsdp.sent import SentWeights

        packs = casts_as_packed(self._spec.config)
        return SentWeights(self.model.net, self._policy.precision, self._spec.device, self._adapters, packs=packs)

    # ---- files

    def pieces_to_save(self, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
        return self.model.pieces(reference)

    def pieces_to_load(self, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
        return self.model.pieces(reference, loads=True)

    def export_hf(self, directory: str, group: ProcessGroup | None) -> None:
        """Writes the model in `policy.precision` with merged weights, and any adapters in PEFT's format."""
        from dagrl.refit.sources import tensors_of
        from dagrl.workers.fsdp.lora import whole_factors
        from dagrl.workers.fsdp.sent import sent_slices
        from dagrl.workers.train.hf_export import export_hf

        assert group is not None, "`setup` has joined one"
        spec, net, precision = self._spec, self.model.net, self._policy.precision
        if self._adapters is None:  # written from the shards themselves
            own, tensors = sent_slices(net, precision), tensors_of(net, dtype=precision)
        else:
            merged = self._weights_to_send()
            merged.update()
            own, tensors = merged.slices, merged.tensors
        export_hf(spec.source, directory, gather_objects(group, own), tensors, spec.context.rank, group, precision)
        if self._adapters is not None:
            whole = {name: [part.cpu() for part in whole_factors(one)] for name, one in self._adapters.held.items()}
            write = partial(write_adapters, Path(directory) / "adapter", str(spec.source), self._policy.peft, whole)
            run_on_all_ranks(group, lambda: write() if spec.context.rank == 0 else None)


def _without_ends(keys: Mapping[str, Json]) -> dict[str, Json]:
    """Returns what affects the computation, of the parts of a model with images as well."""
    return {
        key: _without_ends(value) if isinstance(value, dict) else value
        for key, value in model_keys(keys).items()
        if key not in ("bos_token_id", "eos_token_id")
    }
