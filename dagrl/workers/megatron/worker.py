"""MegatronWorker: one rank of a train group, on Megatron-Core, with or without a GPU.

Its methods implement the phases `train_step`, `logprobs` and `refit`. `MegatronWorkerState` has what is kept between them,
`MegatronWorkerBase` the lifecycle.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from dagrl.channels import ChannelSpec, open_channel
from dagrl.config import Json
from dagrl.config.settings import generates, sends_adapters
from dagrl.errors import RunError
from dagrl.refit import RankPlan, RefitReport, RefitSender, commit_together
from dagrl.refit.slices import WeightSlice
from dagrl.rl.algorithm import Algorithm, algorithm_for
from dagrl.rl.routed_experts import with_empty_record, without_record
from dagrl.runtime.shapes import Array, Batch
from dagrl.runtime.worker import current_replay, in_warmup
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics
from dagrl.workers.families.hf_config import model_keys
from dagrl.workers.megatron.worker_state import MegatronWorkerState

if TYPE_CHECKING:
    from torch import Tensor

    from dagrl.rl.losses import Denominators
    from dagrl.workers.megatron.cuda_graphs import ModelPass
    from dagrl.workers.megatron.forward_backward import MicrobatchLoss
    from dagrl.workers.megatron.model import ModelChunks
    from dagrl.workers.train.microbatches import Microbatches
    from dagrl.workers.train.row_plans import ParallelRank


class MegatronWorker(MegatronWorkerState):
    """A train worker: steps, log-probabilities and refits of its part of the policy."""

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        """Runs one optimizer step on the shard's rows: `tokens`, `lengths`, `loss_mask`, and what the loss reads.

        `loss` names the algorithm (`algorithm_for`). `batch.scalars`: `global_valid_tokens` and `global_valid_sequences` of
        the global batch; optional `lr` replaces the schedule's. A warm-up replay does everything except the update.
        """
        from dagrl.workers.megatron.expert_load import counting
        from dagrl.workers.megatron.flops import throughput_metrics
        from dagrl.workers.megatron.forward_backward import run_losses

        trainer, rate = self._ready("weights", "gradients"), batch.number("lr") if "lr" in batch.scalars else None
        algorithm = algorithm_for(loss, self.config)
        batch = self._with_kept(batch, algorithm)
        denominators = _denominators(batch)
        started = time.perf_counter()
        with self._running(training=True):
            for microbatches in self._microbatches(batch, "train"):
                trainer.offloader.begin_due()
                trainer.zero_gradients()
                scored = self._microbatch_loss(algorithm, denominators)
                with counting(trainer, microbatches, batch.rows) as load:
                    losses = run_losses(trainer.chunks, trainer.model_pass, microbatches, scored, True)
            shared = trainer.step(rate, not in_warmup(), load.update_expert_biases)
            metrics = merge_step_metrics([losses.read(), StepMetrics(shared=shared)])
            experts = load.read()
        seconds = time.perf_counter() - started
        figures = throughput_metrics(
            trainer.model.architecture,
            self.config.policy,
            self.context,
            self._device,
            seconds=seconds,
            lengths=batch["lengths"],
            saved=microbatches.saved,
        )
        return merge_step_metrics([metrics if self._reports else StepMetrics(), experts, figures])

    def evaluate(self, batch: Batch, loss: str) -> StepMetrics:
        """Computes the losses of `train_step` without a step."""
        import torch

        from dagrl.workers.megatron.forward_backward import run_losses

        trainer, algorithm = self._ready("weights"), algorithm_for(loss, self.config)
        with self._running(), torch.no_grad():
            for microbatches in self._microbatches(batch, "train"):
                scored = self._microbatch_loss(algorithm, _denominators(batch))
                losses = run_losses(trainer.chunks, trainer.model_pass, microbatches, scored, False)
            metrics = losses.read()
        return metrics if self._reports else StepMetrics()

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        """Merges the metrics of several workers."""
        return merge_step_metrics(parts)

    def logprobs(self, batch: Batch, model: Literal["policy", "reference"] = "policy") -> Batch | None:
        """Returns `logprobs` and `entropy` [rows, tokens] float32 of the batch's tokens; 0 at entry 0 and in padding.

        Given by one worker of the shard (last stage, tp 0, cp 0); None on the others. Both are of the distribution that
        generation samples from: logits divided by its temperature.
        """
        return self._given(batch, self._logprobs(batch, model, self._ready().model_pass), "logprobs", "entropy")

    def _given(self, batch: Batch, columns: Sequence[Tensor], *names: str) -> Batch | None:
        """Returns the columns under these names, if this worker gives the shard's results; None on the others."""
        if not columns or self.context.coordinates.tp or self.context.coordinates.cp:
            return None
        fields = {name: column.cpu().numpy() for name, column in zip(names, columns, strict=True)}
        return Batch({"lengths": batch["lengths"], **fields}, batch.scalars)

    def answer_sums(self, batch: Batch, model: Literal["policy", "reference"] = "policy") -> Batch | None:
        """Returns `sums` [rows] float64: of the log-probabilities of each row's tokens in `loss_mask`.

        Given by one worker of the shard, as by `logprobs`.
        """
        found = self.logprobs(batch, model)
        return None if found is None else sums_of(batch, found["logprobs"])

    def keep_logprobs(self, batch: Batch, model: Literal["policy", "reference"] = "policy") -> None:
        """Computes `logprobs` and keeps them for the `train_step` of the rows with the same `row_ids`."""
        columns = self._logprobs(batch, model, self._ready().model_pass)
        if columns:
            names = ("prev_logprobs", "entropy") if model == "policy" else ("reference_logprobs",)
            self._keep(batch, dict(zip(names, columns, strict=False)))

    def keep_columns(self, batch: Batch) -> None:
        """Keeps the token fields of `batch` for the `train_step` of the rows with the same `row_ids`."""
        import torch

        with self._running():
            fields = {name: field for name, field in batch.fields.items() if field.ndim == 2}
            self._keep(batch, {name: torch.tensor(field, device=self._device) for name, field in fields.items()})

    def _keep(self, batch: Batch, columns: Mapping[str, Tensor]) -> None:
        if not in_warmup():
            self._kept.keep(batch, **{name: value.cpu().numpy() for name, value in columns.items()})

    def kept_logprobs(self) -> dict[str, dict[int, Array]]:
        """Returns the log-probabilities that this worker keeps for the current step, by name and row id: float32 [tokens].

        Given by one worker of the shard (last stage, tp 0, cp 0); empty on the others.
        """
        place = self.context.coordinates
        return {} if place.tp or place.cp else self._kept.columns()

    def _with_kept(self, batch: Batch, algorithm: Algorithm) -> Batch:
        """Adds the columns that this worker keeps. Only the last stage, which computes the loss, keeps any."""
        last = self.context.coordinates.pp == self.context.layout.pp - 1
        return self._kept.join(batch, algorithm.columns, required=last and not in_warmup())

    def _logprobs(self, batch: Batch, model: Literal["policy", "reference"], model_pass: ModelPass) -> list[Tensor]:
        """Returns log-probabilities and entropy [rows, tokens] on the last stage (0 in padding), else an empty list."""
        from dagrl.workers.megatron.forward_backward import run_logprobs

        if model == "reference" and self._reference_model is not None:
            batch = without_record(batch)  # of experts that another model does not have
        with self._running(), self._chunks_of(model, model_pass) as (held, chunks, chosen_pass):
            layer = held.output_layer(self._temperature, self.config.policy.logprob_chunk_size)
            for microbatches in self._microbatches(batch, "logprob"):
                columns = run_logprobs(chunks, chosen_pass, microbatches, layer)
        return columns

    def calibrate_kv_scales(self, batch: Batch) -> dict[str, float]:
        """Calibrates the scales of generation's FP8 KV cache on `batch` under the current weights.

        All workers call it together; the next refit sends the scales. Returns the largest scale of keys and of values (`k`,
        `v`) over this worker's layers. A warm-up does not change the scales.
        """
        from dagrl.workers.megatron.cuda_graphs import plain_pass
        from dagrl.workers.megatron.kv_scales import without_padding

        if self._kv_scales is None:
            raise RunError("there are no scales to calibrate; set policy.generation.vllm_cfg.kv_cache_dtype=fp8")
        with self._running():
            with nullcontext() if in_warmup() else self._kv_scales.calibrating():
                self._logprobs(without_padding(batch), "policy", plain_pass)  # hooks do not run in a recorded pass
            return self._kv_scales.largest()

    def merge_kv_scales(self, parts: list[dict[str, float]]) -> dict[str, float]:
        """Returns the largest scales of several workers."""
        return {kind: max(part[kind] for part in parts) for kind in parts[0]}

    def merge_rows(self, parts: list[Batch | None]) -> Batch | None:
        """Returns the only part that is not None."""
        found = [part for part in parts if part is not None]
        assert len(found) <= 1, f"{len(found)} workers of one shard gave rows"
        return found[0] if found else None

    def weight_slices(self) -> list[WeightSlice]:
        """Returns which boxes of the HF parameters, or of their adapters, a refit sends, and any FP8 KV-cache scales."""
        return self.describe(self.config, self._hf_config, self.context.layout, self.context.rank)

    def weight_config(self) -> dict[str, Json]:
        """Returns the model configuration that generation workers must agree with."""
        return model_keys(self._hf_config)

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec) -> None:
        """Opens the channel to the generation workers and prepares to send by `plan`."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._sender = None  # free its staging buffers first
        with self._running():
            self._channel = open_channel(channel)
            self._sender = RefitSender(plan, self._sent_tensors(), self._channel, lends=True)

    def _sent_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that `weight_slices()` names: parameters, not their data, as refits follow changes."""
        trainer = self._ready("weights")
        if self._adapters is not None and sends_adapters(self.config):
            return self._adapters.sent()
        scales = {} if self._kv_scales is None else self._kv_scales.tensors
        return {**trainer.model.weights(), **scales}

    def send_weights(self, version: int) -> RefitReport:
        """Sends the current weights as policy version `version`."""
        self._ready("weights")
        if self._sender is None or self._channel is None:
            raise RunError("send_weights before prepare_refit; give every worker its plan and channel first")
        with self._running(), self._refitted(), commit_together(self._channel, wait=False):
            self._sending = True  # also after a failure, until the next phase
            return self._sender.send(version)

    def _refitted(self) -> AbstractContextManager[None]:
        """Context in which `_sent_tensors()` have the current values."""
        if self._adapters is not None and sends_adapters(self.config):
            self._adapters.scale_sent()
            return nullcontext()
        return self._merged()

    @property
    def _temperature(self) -> float:
        """The temperature of what the policy learns from: 1 for data, as only samples have another."""
        generation = self.config.policy.generation if generates(self.config) else None
        return generation.temperature if generation is not None and generation.temperature > 0 else 1.0

    @property
    def _reports(self) -> bool:
        """Whether this worker reports metrics: losses are known on the last stage, and equal on its tp workers."""
        where = self.context.coordinates
        return where.pp == self.context.layout.pp - 1 and where.tp == 0

    def _microbatches(self, batch: Batch, purpose: Literal["train", "logprob"]) -> Iterator[Microbatches]:
        """Yields the batch's microbatches; in a warm-up some of every shape that its phase has not run at."""
        from dagrl.workers.train.microbatches import RoutedModel, split_batch, warmup_batches
        from dagrl.workers.train.row_plans import SplitRule

        rank, rule = self._parallel_rank(), SplitRule.of(self.config.policy, purpose)
        architecture = self._ready().model.architecture
        model = None if architecture.record is None else RoutedModel(architecture.vocabulary, architecture.record)
        if not in_warmup():
            yield split_batch(batch, rule, rank, model)
            return
        batch = with_empty_record(batch)  # its ids are made up
        seen = self._warm_widths.setdefault(current_replay().phase, set())
        times = 2 if self.config.policy.megatron_cfg.cuda_graphs else 1  # the second run of a shape is recorded
        for item in warmup_batches(batch, rule, rank, seen):
            for _ in range(times):
                whole = split_batch(item, rule, rank, model, masked=False)  # the most memory, all of it held meanwhile
                yield whole.for_warmup()

    def _parallel_rank(self) -> ParallelRank:
        from megatron.core import parallel_state

        from dagrl.workers.train.row_plans import ParallelRank

        groups = parallel_state.get_context_parallel_group(), parallel_state.get_data_parallel_group()
        return ParallelRank(self.context.layout, self.context.coordinates, *groups, self._device)

    def _microbatch_loss(self, algorithm: Algorithm, denominators: Denominators) -> MicrobatchLoss:
        from megatron.core import parallel_state

        from dagrl.workers.megatron.forward_backward import MicrobatchLoss

        temperature = self._temperature if algorithm.learns_from == "samples" else 1.0
        layer = self._ready().model.output_layer(temperature, self.config.policy.logprob_chunk_size)
        group = parallel_state.get_context_parallel_group() if self.context.layout.cp > 1 else None
        return MicrobatchLoss(algorithm, denominators, layer, group)

    @contextmanager
    def _chunks_of(
        self, model: Literal["policy", "reference"], model_pass: ModelPass
    ) -> Iterator[tuple[ModelChunks, list[Any], ModelPass]]:
        """Context in which `model` can run. Gives its chunks, what the schedule calls for each, and how."""
        from dagrl.workers.megatron.cuda_graphs import plain_pass

        trainer = self._ready("weights")
        if model == "policy":
            yield trainer.model, trainer.chunks, model_pass
        elif self._reference_model is not None:
            with self._reference_model.on_device() as held:
                yield held, list(held.chunks), plain_pass
                held.forget_microbatches()
        elif self._adapters is not None:
            with self._adapters.disabled():
                yield trainer.model, trainer.chunks, model_pass
        elif self._reference is not None:
            with self._reference.in_place_of(trainer.model.weights()):
                yield trainer.model, trainer.chunks, model_pass
        else:
            raise RunError("there is no reference policy; call snapshot_reference() on all train workers first")


class MegatronTeacherWorker(MegatronWorker):
    """A worker of a frozen model, such as a teacher: it gives log-probabilities under the weights of `model_name`.

    It has no gradients and no optimizer, so a GPU holds a much larger model than in training.
    """

    trains = False


def sums_of(batch: Batch, column: Array) -> Batch:
    """Returns `sums` [rows] float64: of `column` [rows, tokens] over the tokens in `loss_mask`."""
    sums = (column.astype("float64") * batch["loss_mask"]).sum(axis=1)
    return Batch({"lengths": batch["lengths"], "sums": sums}, batch.scalars)


def _denominators(batch: Batch) -> Denominators:
    from dagrl.rl.losses import Denominators

    return Denominators(batch.number("global_valid_tokens"), batch.number("global_valid_sequences"))
