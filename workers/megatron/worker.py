"""MegatronWorker: one rank of a train group, on Megatron-Core, with or without a GPU.

Its methods are what the phases `train_step`, `logprobs` and `refit` name; `GroupMember` is what they stand on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from dagrl.config import Json
from dagrl.errors import ConfigError, RunError
from dagrl.refit.commit import one_part_of_a_refit
from dagrl.refit.slices import WeightSlice
from dagrl.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics
from dagrl.worker import current_replay, in_warmup
from workers.megatron.accumulated import Accumulated
from workers.megatron.member import GroupMember

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.channels.base import ChannelSpec
    from dagrl.losses import Denominators
    from dagrl.refit.moves import RankPlan
    from dagrl.refit.run import RefitReport
    from workers.megatron.cuda_graphs import ModelPass
    from workers.megatron.microbatches import Microbatches
    from workers.megatron.step import LossStep


class MegatronWorker(GroupMember):
    """A train worker: steps, log-probabilities, memory, refits and checkpoints of its part of the policy."""

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        """One optimizer step on the shard's rows (`tokens`, `lengths`, `loss_mask`, and for GRPO the log-probabilities).

        `batch.scalars`: `global_valid_tokens` and `global_valid_sequences` of the whole global batch; `lr`, if there, is
        used instead of the schedule's; `parts`, if there, is how many `accumulate_gradients` came before with other rows of
        that batch. A warm-up replay does all but the update.
        """
        from dagrl.losses import divided, loss_denominator
        from workers.megatron.figures import train_figures
        from workers.megatron.step import run_losses

        trainer, rate = self._ready("weights", "gradients"), batch.number("lr") if "lr" in batch.scalars else None
        denominators, before = _denominators(batch), self._take_accumulated(batch)
        started = time.perf_counter()
        with self._running():
            for cut in self._cuts(batch, "train"):
                trainer.offloader.begin_due()
                if before.parts:
                    trainer.scale_gradients(1 / loss_denominator(loss, self.config.loss_fn, denominators))
                else:
                    trainer.zero_gradients()
                losses = run_losses(trainer.chunks, trainer.way, cut, self._loss_step(denominators, loss), True)
            shared = trainer.step(rate, apply=not in_warmup())
            early = divided(before.metrics, loss, self.config.loss_fn, denominators)
            metrics = merge_step_metrics([early, losses.read(), StepMetrics(shared=shared)])
        whole = before.with_part(metrics, time.perf_counter() - started, batch["lengths"])
        figures = train_figures(
            trainer.model.architecture, self.config.policy, self.context, self._device, whole.lengths, whole.seconds
        )
        return merge_step_metrics([metrics if self._reports else StepMetrics(), figures])

    def accumulate_gradients(self, batch: Batch, loss: str) -> None:
        """Gradients of some rows of a global batch whose others are not there yet; its `train_step` takes them up.

        `batch.scalars`: `parts`, how many came before for that batch; with 0, or without, gradients begin anew. They are of
        a sum, which `train_step` divides, and stay on each worker until then. A warm-up replay leaves nothing.
        """
        from dagrl.losses import UNDIVIDED
        from workers.megatron.step import accumulate_losses

        trainer, before = self._ready("weights", "gradients"), self._take_accumulated(batch)
        started = time.perf_counter()
        with self._running():
            for cut in self._cuts(batch, "train"):
                if not before.parts:
                    trainer.zero_gradients()
                losses = accumulate_losses(trainer.chunks, trainer.way, cut, self._loss_step(UNDIVIDED, loss))
            metrics = losses.read()
        if not in_warmup():
            self._accumulated = before.with_part(metrics, time.perf_counter() - started, batch["lengths"])

    def _take_accumulated(self, batch: Batch) -> Accumulated:
        """What came before the batch's rows; whatever becomes of them, it is not to be added to again."""
        found, self._accumulated = self._accumulated, Accumulated()
        return found.before(int(batch.number("parts", 0)))

    def evaluate(self, batch: Batch, loss: str) -> StepMetrics:
        """The losses of `train_step` without a step."""
        import torch

        from workers.megatron.step import run_losses

        trainer = self._ready("weights")
        with self._running(), torch.no_grad():
            for cut in self._cuts(batch, "train"):
                losses = run_losses(trainer.chunks, trainer.way, cut, self._loss_step(_denominators(batch), loss), False)
            metrics = losses.read()
        return metrics if self._reports else StepMetrics()

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        """One `StepMetrics` from those of several workers."""
        return merge_step_metrics(parts)

    def logprobs(self, batch: Batch, model: Literal["policy", "reference"] = "policy") -> Batch | None:
        """`logprobs` and `entropy` [rows, tokens] float32 of the batch's own tokens; 0 at entry 0 and in the padding.

        Given by one worker of the shard (last stage, tp 0, cp 0); None on the others. Both are of the distribution that
        generation samples from: logits divided by its temperature.
        """
        return self._logprobs(batch, model, self._ready().way)

    def _logprobs(self, batch: Batch, model: Literal["policy", "reference"], way: ModelPass) -> Batch | None:
        import numpy as np

        from workers.megatron.step import run_logprobs

        trainer = self._ready("weights")
        with self._running(), self._weights_of(model):
            layer = trainer.model.output_layer(self._temperature, self.config.policy.logprob_chunk_size)
            for cut in self._cuts(batch, "logprob"):
                columns = run_logprobs(trainer.chunks, way, cut, layer)
        if not columns or self.context.coordinates.tp or self.context.coordinates.cp:
            return None
        inside = np.arange(batch.tokens)[None, :] < batch["lengths"].astype(np.int64)[:, None]
        logprobs, entropy = (np.where(inside, column.cpu().numpy(), np.float32(0)) for column in columns)
        return Batch({"lengths": batch["lengths"], "logprobs": logprobs, "entropy": entropy}, batch.scalars)

    def offload(self, what: tuple[str, ...]) -> None:
        """Move some of `weights`, `gradients` and `optimizer` to host memory and give the GPU's memory back.

        Weights and optimizer state come back as they were, gradients as zeros. What needs a part that is away is an error.
        """
        if self._channel is not None:
            self._channel.release()
        trainer = self._ready()
        with self._running():
            trainer.forget_recordings()
            trainer.offloader.offload(what)
        if "gradients" in what:
            self._accumulated = Accumulated()

    def reload(self, what: tuple[str, ...]) -> None:
        """The inverse of `offload`; the addresses of tensors may be others than before."""
        with self._running():
            self._ready().offloader.reload(what)

    def prepare_for_logprobs(self, step: int) -> None:
        """Begin to move the optimizer's state to the host; log-probabilities are computed meanwhile."""
        offloader = self._ready().offloader
        with self._running():
            offloader.offload(("optimizer",), wait=False)
            if in_warmup():  # host memory is allocated by now; state stays where it was
                offloader.reload(("optimizer",))

    def prepare_for_training(self, step: int) -> None:
        """Let the optimizer's state come back while the next step's gradients are computed."""
        self._ready().offloader.reload_soon(("optimizer",))

    def calibrate_kv_scales(self, batch: Batch) -> dict[str, float]:
        """Set the scales of generation's KV cache in FP8 to what `batch` asks for under the current weights.

        All workers together; the next refit carries them. Gives the largest of this worker's layers, of keys and of values
        (`k`, `v`). A warm-up leaves them as they are.
        """
        from workers.megatron.cuda_graphs import plain_pass
        from workers.megatron.kv_scales import without_padding

        if self._kv_scales is None:
            raise RunError("there are no scales to calibrate; set policy.generation.vllm_cfg.kv_cache_dtype=fp8")
        with self._running():
            with nullcontext() if in_warmup() else self._kv_scales.calibrating(self.config.refit.kv_scale_margin):
                self._logprobs(without_padding(batch), "policy", plain_pass)  # in a replay nobody can look at the keys
            return self._kv_scales.largest()

    def merge_kv_scales(self, parts: list[dict[str, float]]) -> dict[str, float]:
        """The largest scales of several workers."""
        return {kind: max(part[kind] for part in parts) for kind in parts[0]}

    def merge_rows(self, parts: list[Batch | None]) -> Batch | None:
        """The one part that is not None."""
        found = [part for part in parts if part is not None]
        assert len(found) <= 1, f"{len(found)} workers of one shard gave rows"
        return found[0] if found else None

    def snapshot_reference(self) -> None:
        """Keep a copy of the current weights, where `policy.reference_weights` says, as the reference policy."""
        with self._running():
            self._keep_reference(self.weight_tensors())

    def _keep_reference(self, weights: Mapping[str, Tensor]) -> None:
        from workers.megatron.reference import ReferencePolicy

        self._reference = None  # its memory goes before new memory is taken
        self._reference = ReferencePolicy(weights, self.config.policy.reference_weights, self._device)

    def weight_slices(self) -> list[WeightSlice]:
        """Which boxes of the HF parameters lie where in `weight_tensors()`; with scales of generation's KV cache in FP8."""
        return self.describe(self.config, self._hf_config, self.context.layout, self.context.rank)

    def weight_config(self) -> dict[str, Json]:
        """What of the model's configuration generation workers must agree with."""
        from workers.families.keys import model_keys

        return model_keys(self._hf_config)

    def weight_tensors(self) -> dict[str, Tensor]:
        """Live local tensors by name."""
        return self._ready("weights").model.tensors()

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec) -> None:
        """Open the channel to the generation workers and make ready to send by `plan`."""
        from dagrl.channels.base import open_channel
        from dagrl.refit.run import RefitSender

        if self._channel is not None:
            self._channel.close()
        self._channel = self._sender = None  # with its staging, before there is another
        live: dict[str, Tensor] = dict(self._ready("weights").model.parameters())  # not their data: refits follow them
        if self._kv_scales is not None:
            live |= self._kv_scales.tensors
        with self._running():
            self._channel = open_channel(channel)
            self._sender = RefitSender(plan, live, self._channel, self.config.refit.verify, self.config.refit.cuda_graph)

    def send_weights(self, version: int) -> RefitReport:
        """Send the current weights as policy version `version`."""
        self._ready("weights")
        if self._sender is None or self._channel is None:
            raise RunError("send_weights before prepare_refit; give every worker its plan and channel first")
        with self._running(sending=True), one_part_of_a_refit(self._channel, wait=False):
            return self._sender.send(version)

    def save_checkpoint(self, directory: str, state: dict[str, Json], background: bool = False) -> None:
        """Write all that the next step depends on, and the driver's `state`, to `directory`; all workers together.

        In the background it is still being written when this returns, and gets its name in `finish_checkpoint`, which a
        later save calls itself.
        """
        from workers.megatron.checkpoint import Saving

        trainer = self._ready("weights", "optimizer")
        with self._running():
            self._finish_saving()
            identity = self._identity
            reference = None if self._reference is None else self._reference.tensors
            group = self._files_group
            self._saving = Saving(directory, trainer, reference, state, identity, group, background=background)
            if not background:
                self._finish_saving()

    def checkpoint_written(self) -> bool:
        """Whether this worker has written its part of the checkpoint begun in the background."""
        return self._saving is None or self._saving.is_written

    def finish_checkpoint(self) -> None:
        """Complete a checkpoint begun in the background, waiting at most `timeouts.checkpoint_s`; all workers together."""
        self._ready()
        with self._running():
            self._finish_saving()

    def load_checkpoint(self, directory: str) -> dict[str, Json]:
        """Take up a checkpoint of the same model, of this layout or another; the driver's state.

        CheckpointError, with everything unchanged, when it cannot be.
        """
        from workers.megatron.checkpoint import load_checkpoint

        trainer = self._ready("weights", "optimizer")
        with self._running():
            self._finish_saving()
            reference, state = load_checkpoint(directory, trainer, self._identity, self._files_group)
            self._reference = None
            if reference is not None and self.config.loss_fn.reference_policy_kl_penalty:
                self._keep_reference(reference)
        return state

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish(self.config.timeouts.checkpoint_s)

    def export_hf(self, directory: str) -> None:
        """Write the policy as a Hugging Face directory that transformers loads; all workers together."""
        from workers.megatron.hf_export import export_hf

        slices = [self._slices_of(rank) for rank in range(self.context.layout.world_size)]
        with self._running():
            export_hf(self._source, directory, slices, self.weight_tensors(), self.context.rank, self._files_group)

    def reset_optimizer(self) -> None:
        """Forget moments and schedule, as if training began with the current weights."""
        trainer = self._ready()
        with self._running():
            trainer.reset_optimizer()

    @property
    def _identity(self) -> dict[str, Json]:
        from workers.megatron.manifest import identity_of

        return identity_of(self.config.policy.precision, self._hf_config)

    @property
    def _temperature(self) -> float:
        generation = self.config.policy.generation
        return generation.temperature if generation is not None and generation.temperature > 0 else 1.0

    @property
    def _reports(self) -> bool:
        """Whether this worker's metrics count: losses are known to the last stage, and equal on its tp workers."""
        where = self.context.coordinates
        return where.pp == self.context.layout.pp - 1 and where.tp == 0

    def _cuts(self, batch: Batch, purpose: Literal["train", "logprob"]) -> Iterator[Microbatches]:
        """The batch's microbatches; in a warm-up first those of every other shape that its phase has not run at."""
        from megatron.core import parallel_state

        from workers.megatron.microbatches import CutRule, Place, cut_batch, warmup_batches

        groups = parallel_state.get_context_parallel_group(), parallel_state.get_data_parallel_group()
        place = Place(self.context.layout, self.context.coordinates, *groups, self._device)
        rule, model = CutRule.of(self.config.policy, purpose), self._ready().model.architecture
        vocabulary = model.vocabulary if model.experts else None
        if not in_warmup():
            return iter((cut_batch(batch, rule, place, vocabulary),))
        seen = self._warm_widths.setdefault(current_replay().phase, set())
        times = 2 if self.config.policy.megatron_cfg.cuda_graphs else 1  # the second of a shape is recorded
        warmups = (item for item in warmup_batches(batch, rule, place, seen) for _ in range(times))
        return (cut_batch(item, rule, place, vocabulary) for item in warmups)

    def _loss_step(self, denominators: Denominators, loss: str) -> LossStep:
        from dagrl.losses import LOSSES
        from workers.megatron.step import LossStep

        if loss not in LOSSES:
            raise ConfigError(f"loss {loss!r} is unknown; choose one of {sorted(LOSSES)}")
        temperature = 1.0 if loss == "sft" else self._temperature  # SFT learns the distribution itself
        layer = self._ready().model.output_layer(temperature, self.config.policy.logprob_chunk_size)
        return LossStep(loss, self.config.loss_fn, denominators, layer)

    @contextmanager
    def _weights_of(self, model: Literal["policy", "reference"]) -> Iterator[None]:
        """Let the model hold the reference's weights for a while."""
        if model == "policy":
            yield
            return
        if self._reference is None:
            raise RunError("there is no reference policy; call snapshot_reference() on all train workers first")
        with self._reference.in_place_of(self._ready().model.parameters()):
            yield


def _denominators(batch: Batch) -> Denominators:
    from dagrl.losses import Denominators

    return Denominators(batch.number("global_valid_tokens"), batch.number("global_valid_sequences"))
