"""What a train worker keeps between phases: weights, optimizer and reference policy; where they lie, saved and exported."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config import Json
from dagrl.config.settings import holds_reference
from dagrl.files import FileEntry
from dagrl.machine import DeviceMemory
from dagrl.refit.slices import WeightSlice, expand
from dagrl.run.comparison import WeightDifference
from dagrl.runtime.worker import in_warmup
from dagrl.workers.megatron.adapter_files import write_adapters
from dagrl.workers.megatron.groups import gather_objects, run_on_all_ranks
from dagrl.workers.megatron.hf_export import export_hf
from dagrl.workers.megatron.identity import identity_of
from dagrl.workers.megatron.worker_base import MegatronWorkerBase

if TYPE_CHECKING:
    from torch import Tensor


class MegatronWorkerState(MegatronWorkerBase):
    """The state of a train worker: offloaded, saved, loaded, compared and exported."""

    def offload(self, what: tuple[str, ...]) -> None:
        """Moves some of `weights`, `gradients` and `optimizer` to host memory and frees the GPU memory.

        Weights and optimizer state come back unchanged, gradients as zeros. Using an offloaded part raises RunError.
        """
        if self._channel is not None:
            self._channel.release()
        if self._sender is not None and "weights" in what:
            self._sender.reclaim()
        trainer = self._ready()
        with self._running():
            trainer.offload(what)

    def reload(self, what: tuple[str, ...]) -> None:
        """Reverses `offload`. Addresses of tensors may change."""
        with self._running():
            self._ready().offloader.reload(what)

    def device_memory(self) -> DeviceMemory | None:
        """Returns the memory of this worker's GPU; None without one. The parts are those of `offload`."""
        import torch

        from dagrl.workers.train.offload import STATE_PARTS

        if self._device.type != "cuda":
            return None
        with self._running():
            offloader = self._ready().offloader
            free, total = torch.cuda.mem_get_info(self._device)
            return DeviceMemory(free, total, {part: offloader.nbytes(part) for part in STATE_PARTS})

    def limit_memory(self, share: float | None) -> bool:
        """Limits this worker to a share of its GPU's memory; None: ends that. Returns whether a warm-up has needed more.

        After such a warm-up the worker is as before it. Only for the single worker of a group: peers would wait for one that
        stops. The next warm-up runs at all shapes again.
        """
        import torch

        exceeded, self._exceeded, self._limited = self._exceeded, False, share is not None
        self._warm_widths.clear()
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0 if share is None else share, self._device)
            if exceeded:
                gc.collect()  # what a traceback held
                with self._running():
                    torch.cuda.empty_cache()
        return exceeded

    def prepare_for_logprobs(self, step: int) -> None:
        """Starts moving the optimizer's state to the host while log-probabilities are computed."""
        offloader = self._ready().offloader
        with self._running():
            offloader.offload(("optimizer",), wait=False)
            if in_warmup():  # allocate the host memory, but keep the state on the device
                offloader.reload(("optimizer",))

    def prepare_for_training(self, step: int) -> None:
        """Schedules the optimizer's state to come back while the next step's gradients are computed."""
        self._ready().offloader.reload_soon(("optimizer",))

    def reset_optimizer(self) -> None:
        """Resets moments and schedule, as if training started with the current weights."""
        trainer = self._ready()
        with self._running():
            trainer.reset_optimizer()

    def weight_tensors(self) -> dict[str, Tensor]:
        """Returns live local tensors by name. An overlapped parameter gathering may be pending in them."""
        return self._ready("weights").model.tensors()

    def snapshot_reference(self) -> None:
        """Keeps a copy of the current weights as the reference policy, where `policy.reference_weights` says.

        With LoRA there is no copy: the reference policy is the base model, also after earlier steps. With
        `policy.reference_model_name` it loads that model instead, once.
        """
        from dagrl.workers.megatron.reference import ReferenceModel

        name, policy = self.config.policy.reference_model_name, self.config.policy
        if name is None and self._adapters is not None:
            return
        with self._running():
            if name is None:
                self._keep_reference(self.weight_tensors())
            elif self._reference_model is None:
                self._reference_model = ReferenceModel(Path(name), policy, self.context, self._device)

    def _keep_reference(self, weights: Mapping[str, Tensor]) -> None:
        from dagrl.workers.megatron.reference import ReferencePolicy

        self._reference = None  # free its memory before allocating
        self._reference = ReferencePolicy(weights, self.config.policy.reference_weights, self._device)

    def save_checkpoint(self, directory: str, background: bool = False) -> dict[str, FileEntry] | None:
        """Writes everything the next step depends on to `directory`; all workers together.

        Returns size and checksum of the files that this worker wrote. With `background` the state is copied and still being
        written on return; `finish_checkpoint` returns the files then.
        """
        from dagrl.workers.megatron.checkpoint import start_saving

        trainer = self._ready("weights", "optimizer")
        with self._running():
            self._finish_saving()
            reference = None if self._reference is None else self._reference.tensors
            group = self._files_group
            self._saving = start_saving(directory, trainer, reference, self._identity, group, background=background)
            return None if background else self._finish_saving()

    def checkpoint_written(self) -> bool:
        """Whether a background checkpoint is written by all workers."""
        return self._saving is None or self._saving.is_written

    def finish_checkpoint(self) -> dict[str, FileEntry] | None:
        """Waits for a background checkpoint, at most `timeouts.checkpoint_s`; all workers together."""
        self._ready()
        with self._running():
            return self._finish_saving()

    def _finish_saving(self) -> dict[str, FileEntry] | None:
        saving, self._saving = self._saving, None
        return None if saving is None else saving.finish(self.config.timeouts.checkpoint_s)

    def load_checkpoint(self, directory: str) -> None:
        """Loads a checkpoint of the same model from any layout. Raises CheckpointError."""
        from dagrl.workers.megatron.checkpoint import load_checkpoint

        trainer = self._ready("weights", "optimizer")
        with self._running():
            self._finish_saving()
            reference = load_checkpoint(directory, trainer, self._identity, self._files_group)
            self._reference = None
            if reference is not None and holds_reference(self.config) and self._reference_model is None:
                self._keep_reference(reference)

    def compare_checkpoint(self, directory: str) -> tuple[int, list[WeightDifference]]:
        """Loads a checkpoint as `load_checkpoint`. Returns the number of its tensors here, and those that differ from what
        this worker had, in the model's order."""
        had = {name: tensor.detach().clone() for name, tensor in self.weight_tensors().items()}
        self.load_checkpoint(directory)
        pairs = ((name, tensor, had[name]) for name, tensor in self.weight_tensors().items())
        found = [different_weights(name, self.context.rank, saved, mine) for name, saved, mine in pairs]
        return len(had), [one for one in found if one is not None]

    def export_hf(self, directory: str) -> None:
        """Writes the policy as a Hugging Face directory that transformers can load; all workers together.

        With LoRA the weights are merged, and `adapter/` has the adapters in PEFT's format.
        """
        slices = [self._slices_of(rank) for rank in range(self.context.layout.world_size)]
        with self._running(), self._merged():
            export_hf(self._source, directory, slices, self.weight_tensors(), self.context.rank, self._files_group)
            self._export_adapters(Path(directory) / "adapter", slices)

    def _export_adapters(self, directory: Path, slices: list[list[WeightSlice]]) -> None:
        """Writes the adapters in PEFT's format. The first rank with a part of a parameter gives its adapter."""
        if self._adapters is None:
            return
        owners = {piece.name: rank for rank, held in reversed(list(enumerate(slices))) for piece in expand(held)}
        mine = {
            name: [part.detach().cpu() for part in adapter]
            for name, adapter in self._adapters.held.items()
            if owners[name] == self.context.rank
        }
        adapters = {name: one for part in gather_objects(self._files_group, mine) for name, one in part.items()}
        settings, base = self.config.policy.megatron_cfg.peft, str(self._source.absolute())
        write = self.context.rank == 0
        run_on_all_ranks(self._files_group, lambda: write_adapters(directory, base, settings, adapters) if write else None)

    @contextmanager
    def _merged(self) -> Iterator[None]:
        """Context in which the model's parameters include any adapters."""
        with self._adapters.merged() if self._adapters is not None else nullcontext():
            yield

    @property
    def _identity(self) -> dict[str, Json]:
        return identity_of(self.config.policy, self._hf_config)


def different_weights(name: str, rank: int, recorded: Tensor, found: Tensor) -> WeightDifference | None:
    """Returns how two tensors of one shape differ; None if they are equal bit for bit."""
    unequal = recorded != found
    if not unequal.any():
        return None
    index = tuple(unequal.nonzero()[0].tolist())
    values = float(recorded[index]), float(found[index])
    largest, scale = float((recorded.float() - found.float()).abs().max()), float(recorded.float().abs().max())
    return WeightDifference(name, rank, index, *values, largest, scale)
