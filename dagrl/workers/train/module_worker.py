"""ModuleWorker: the base of a train worker of your own, for any torch module of which each rank has a whole copy.

A subclass sets `model` and `optimizer`, and computes log-probabilities. Steps, kept log-probabilities, refits and files are
here, for every algorithm that learns from log-probabilities of tokens. `dagrl/examples/hf_worker.py` is one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dagrl.channels import Channel, ChannelSpec, open_channel
from dagrl.config import Config, Json
from dagrl.errors import ConfigError
from dagrl.refit import RankPlan, RefitReport, RefitSender, WeightSlice, commit_together
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.rl.algorithm import algorithm_for
from dagrl.rl.losses import Denominators, batch_loss
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext, in_warmup
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics
from dagrl.workers.train.hf_export import export_hf
from dagrl.workers.train.kept_logprobs import KeptLogprobs
from dagrl.workers.train.optimizer import OptimizerSteps


class ModuleWorker:
    """One rank of a data-parallel group. `setup(address)` and `logprobs_of` are the subclass's."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    reference: torch.nn.Module

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context, self.config, self.policy = context, config, config.policy
        self.kept, self.steps = KeptLogprobs(), OptimizerSteps(config)
        self._temperature = 1.0 if config.policy.generation is None else config.policy.generation.temperature
        self._channel: Channel | None = None

    @classmethod
    def check(cls, config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raises ConfigError for a layout that splits the model."""
        layout = config.policy.train_layout
        if layout.world_size != layout.dp:
            raise ConfigError(
                f"{cls.__name__} (policy.worker) has the whole model on each rank; set all sizes of policy.megatron_cfg but "
                "data_parallel_size to 1"
            )

    def logprobs_of(self, model: torch.nn.Module, batch: Batch, temperature: float) -> Tensor:
        """Returns the log-probability of each token given those before it [rows, tokens]: 0 at entry 0, any in padding.

        They are those of logits divided by `temperature`.
        """
        raise NotImplementedError

    def _shares(self, batch: Batch, loss: str) -> Iterator[tuple[Tensor, StepMetrics]]:
        """Yields the share of each microbatch of the loss over the global batch, and its metrics."""
        algorithm, size = algorithm_for(loss, self.config), self.policy.train_micro_batch_size
        temperature = self._temperature if algorithm.learns_from == "samples" else 1.0
        batch = self.kept.join(batch, algorithm.columns, required=not in_warmup())
        counts = Denominators(batch.number("global_valid_tokens"), batch.number("global_valid_sequences"))
        for start in range(0, batch.rows, size):
            rows = batch.select(range(start, min(start + size, batch.rows)))
            columns = {name: torch.tensor(field) for name, field in rows.fields.items() if field.ndim == 2}
            share = batch_loss(algorithm, self.logprobs_of(self.model, rows, temperature), columns, counts)
            sums, maxima = ({name: float(value) for name, value in side.items()} for side in (share.sums, share.maxima))
            yield share.loss, StepMetrics(sums, maxima)

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: str) -> StepMetrics:
        """Computes the losses of `train_step` without a step."""
        return merge_step_metrics(metrics for _, metrics in self._shares(batch, loss))

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        """Takes an optimizer step. A warm-up does everything but the update.

        A weight that no sequence of this rank has used, such as an expert's, has a gradient of zero: ranks sum all of them.
        """
        parts = []
        for share, metrics in self._shares(batch, loss):
            share.backward()  # type: ignore[no-untyped-call]
            parts.append(metrics)
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                dist.all_reduce(weight.grad)
        step = self.steps.take(self, batch.number("lr") if "lr" in batch.scalars else None, apply=not in_warmup())
        self.optimizer.zero_grad()
        return merge_step_metrics([*parts, StepMetrics(shared=step)])

    def gradient_norm(self) -> Tensor:
        """Returns the norm of all gradients, which are the same on all ranks."""
        return get_total_norm([weight.grad for weight in self.model.parameters() if weight.grad is not None])

    def clip(self, limit: float, norm: Tensor) -> None:
        clip_grads_with_norm_(self.model.parameters(), limit, norm)

    def update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def merge_metrics(self, parts: Sequence[StepMetrics]) -> StepMetrics:
        """Joins the metrics of a shard's ranks."""
        return merge_step_metrics(parts)

    @torch.no_grad()
    def keep_logprobs(self, batch: Batch, model: str) -> None:
        """Keeps the log-probabilities of samples under `policy` or `reference` for the step that trains on them."""
        chosen, name = (self.model, "prev_logprobs") if model == "policy" else (self.reference, "reference_logprobs")
        found = self.logprobs_of(chosen, batch, self._temperature).numpy(force=True)
        if not in_warmup():
            self.kept.keep(batch, **{name: found})

    def snapshot_reference(self) -> None:
        """Makes the current weights the reference policy."""
        self.reference = copy.deepcopy(self.model)

    def weight_slices(self) -> list[WeightSlice]:
        """Returns the boxes of the Hugging Face parameters that this rank sends."""
        return slices_of(self.model, dtype=self.policy.precision)

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec) -> None:
        """Opens the channel to the generation workers."""
        if self._channel is not None:
            self._channel.close()
        self._channel = open_channel(channel)
        self._sender = RefitSender(plan, tensors_of(self.model, dtype=self.policy.precision), self._channel)

    def send_weights(self, version: int) -> RefitReport:
        """Sends the current weights as policy version `version`."""
        assert self._channel is not None, "prepare_refit comes first"
        with commit_together(self._channel, wait=False):
            return self._sender.send(version)

    def save_checkpoint(self, directory: str) -> None:
        """Writes weights, moments and the count of steps, from rank 0."""
        if self.context.rank == 0:
            Path(directory).mkdir(parents=True, exist_ok=True)
            torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.steps.taken], f"{directory}/state.pt")

    def load_checkpoint(self, directory: str) -> None:
        """Reads what `save_checkpoint` wrote, on every rank."""
        model, optimizer, self.steps.taken = torch.load(f"{directory}/state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def export_hf(self, directory: str) -> None:
        """Writes the model as a Hugging Face directory."""
        slices = [self.weight_slices()] * self.context.layout.world_size
        tensors = tensors_of(self.model, dtype=self.policy.precision)
        source, group, rank = str(self.policy.model_name), dist.group.WORLD, self.context.rank
        export_hf(source, directory, slices, tensors, rank, group, self.policy.precision)
