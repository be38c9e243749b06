"""dagrl as a backend of vLLM's weight transfers: the engine's end, and the trainer's.

Engine: `LLM(model, weight_transfer_config={"backend": "dagrl"})`, or `vllm serve --weight-transfer-config ...`. Trainer:

    source = SliceSource(model)                                # plain, FSDP2, tensor-parallel or Hugging Face module
    info = DagrlTrainerInitInfo("10.0.0.1:29600", world_size, rank=rank)
    trainer = DagrlTrainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
    trainer.send_weights()                                     # on every trainer rank, after each step

vLLM's own `WeightTransferTrainerFactory.trainer_init` does the same in processes with an engine, which load vLLM's plugins.
Trainer ranks send their own shards to the engine's ranks, by a plan made in `trainer_init`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dagrl.channels import open_channel
from dagrl.errors import ChannelError, ConfigError, RunError, error_text
from dagrl.refit.carry.commit import commit_together
from dagrl.refit.carry.endpoint import RefitReceiver, RefitSender
from dagrl.refit.rendezvous import Meeting, meet, while_called
from dagrl.refit.sources import ToHf, slices_of, tensors_of
from dagrl.refit.transfers import Verify
from dagrl.workers.vllm.destinations import find_destinations
from dagrl.workers.vllm.loader import take_loaded_model
from dagrl.workers.vllm.plugin import BACKEND

if TYPE_CHECKING:
    from dagrl.channels import Channel


class SliceSource(ModuleSource):  # type: ignore[misc]
    """A module as source of weights that are sent from where they are; see `dagrl.refit.sources.slices_of`."""

    def __init__(self, module: torch.nn.Module, *, dtype: str = "bfloat16", to_hf: ToHf | None = None) -> None:
        super().__init__(module)
        self.dtype = dtype
        self.slices = slices_of(module, dtype=dtype, to_hf=to_hf)
        self.tensors = tensors_of(module, dtype=dtype, to_hf=to_hf)


@dataclass
class DagrlTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """How one trainer rank meets the engine.

    `address` is a free `host:port` on the host of rank 0, `world_size` the number of trainer ranks. `target_dtype`: the
    engine's dtype if it differs from the source's. `tied_embeddings`: fill an engine's own head from the embedding.
    `timeout_s` limits the meeting and every wait of a refit.
    """

    backend: ClassVar[str] = BACKEND
    address: str
    world_size: int = 1
    target_dtype: str | None = None
    tied_embeddings: bool = False
    verify: Verify = "off"
    timeout_s: float = 300.0


@dataclass
class DagrlInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the engine's ranks meet the trainer."""

    address: str
    timeout_s: float


@dataclass
class DagrlUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Number of the update. Both ends compare it before a byte is written."""

    version: int


class DagrlEngine(WeightTransferEngine[DagrlInitInfo, DagrlUpdateInfo]):  # type: ignore[misc]
    """The end in one worker of vLLM, whatever its executor: it writes into the live parameters of this rank."""

    init_info_cls = DagrlInitInfo
    update_info_cls = DagrlUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        tied = bool(getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))
        self._destinations = find_destinations(model, take_loaded_model(model), vllm_config, tied=tied)
        self._channel: Channel | None = None
        self._receiver: RefitReceiver | None = None

    def init_transfer_engine(self, init_info: DagrlInitInfo) -> None:
        """Meets the trainer. Called on all workers at once, and again for another trainer."""
        from vllm.distributed import get_world_group

        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + get_world_group().rank_in_group % parallel.world_size
        size = parallel.world_size * parallel.data_parallel_size
        meeting = Meeting(init_info.address, "generation", rank, size, init_info.timeout_s)
        plan, spec = meet(meeting, self._destinations.slices, device=self.device)
        self._channel = open_channel(spec)
        self._receiver = RefitReceiver(plan, self._destinations.tensors, self._channel)

    def start_weight_update(self) -> None:
        """Does nothing: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Does nothing: `update_weights` returns when all ranks have committed."""

    def receive_weights(self, update_info: DagrlUpdateInfo) -> None:
        """Receives the weights and recomputes what vLLM derives from them. Raises on all ranks if one fails."""
        if self._receiver is None or self._channel is None:
            raise RunError("no trainer has met this engine; call init_weight_transfer_engine first")
        with torch.inference_mode(), commit_together(self._channel, wait=True):
            self._receiver.receive(update_info.version)
            for hook in self._destinations.hooks:
                hook()

    def shutdown(self) -> None:
        """Closes the channel; the engine can meet another trainer."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._receiver = None


class DagrlTrainer(TrainerWeightTransferEngine[DagrlTrainerInitInfo]):  # type: ignore[misc]
    """The trainer's end, on every trainer rank. Rank 0 drives the engine through `client`."""

    init_info_cls = DagrlTrainerInitInfo

    def __init__(
        self, client: VLLMWeightSyncClient, source: SliceSource, is_sender: bool, channel: Channel, sender: RefitSender
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._channel, self._sender, self._version = channel, sender, 0

    @classmethod
    def trainer_init(
        cls, init_info: DagrlTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Meets the engine's ranks, which rank 0 calls, and plans."""
        if not isinstance(source, SliceSource):
            raise ConfigError(f"the source is a {type(source).__name__}; the backend dagrl expects SliceSource(module)")
        init = {"address": init_info.address, "timeout_s": init_info.timeout_s}
        meeting = Meeting(init_info.address, "train", init_info.rank, init_info.world_size, init_info.timeout_s)

        def invite() -> None:
            try:
                client.init_weight_transfer_engine(init)
            except Exception as error:
                raise ChannelError(
                    f"the engine does not take part ({error_text(error)}); start it with the weight_transfer_config "
                    '{"backend": "dagrl"}, and a server with VLLM_SERVER_DEV_MODE=1 too'
                ) from error

        def connect(check: Callable[[], None]) -> tuple[Channel, RefitSender]:
            plan, spec = meet(
                meeting,
                source.slices,
                device=next((tensor.device for tensor in source.tensors.values()), None),
                dtype=source.dtype,
                target_dtype=init_info.target_dtype,
                tied_embeddings=init_info.tied_embeddings,
                verify=init_info.verify,
                while_waiting=check,
            )
            channel = open_channel(spec)
            return channel, RefitSender(plan, source.tensors, channel)

        channel, sender = while_called(connect, [invite] if init_info.is_sender else [])
        return cls(client, source, init_info.is_sender, channel, sender)

    def send_weights(self) -> None:
        """Sends the weights as they are now, and returns when the engine's ranks have committed (rank 0: they all have)."""
        self._version += 1
        if self.is_sender:
            self.client.start_weight_update()
        calls = [lambda: self.client.update_weights({"version": self._version})] if self.is_sender else []
        while_called(self._send, calls)
        if self.is_sender:
            self.client.finish_weight_update()

    def _send(self, check: Callable[[], None]) -> None:
        with commit_together(self._channel, wait=False):
            self._sender.send(self._version)

    def shutdown(self) -> None:
        """Closes the channel."""
        self._channel.close()
