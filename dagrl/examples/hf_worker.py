"""A train worker of your own: any causal language model of Hugging Face, a whole copy on each rank, on the CPU.

dagrl train examples/grpo_quickstart.yaml policy.worker=hf_worker:HfWorker    # found on PYTHONPATH, or in this directory
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM

from dagrl import Batch, WorkerContext, in_warmup
from dagrl.channels import ChannelSpec, open_channel
from dagrl.config import Config
from dagrl.refit import RankPlan, RefitReport, RefitSender, WeightSlice, commit_together
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.rl.algorithm import algorithm_for
from dagrl.rl.losses import Denominators, batch_loss
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics
from dagrl.workers.train.hf_export import export_hf
from dagrl.workers.train.kept_logprobs import KeptLogprobs
from dagrl.workers.train.optimizer import OptimizerSteps


class HfWorker:
    requires = ("transformers",)

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context, self.config, self.policy = context, config, config.policy
        self.kept, self.steps = KeptLogprobs(), OptimizerSteps(config)

    def setup(self, address: str) -> None:
        world = {"world_size": self.context.layout.world_size, "rank": self.context.rank}
        dist.init_process_group("gloo", f"tcp://{address}", **world)
        self.model = AutoModelForCausalLM.from_pretrained(self.policy.model_name, dtype=torch.float32)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=self.policy.optimizer.weight_decay)
        self.steps.taken = 0

    def logprobs_of(self, model: torch.nn.Module, batch: Batch, temperature: float) -> Tensor:
        tokens = torch.tensor(batch["tokens"])  # padding comes last, where the causal mask hides it
        every = (model(tokens).logits[:, :-1] / temperature).log_softmax(-1)
        return torch.nn.functional.pad(every.gather(2, tokens[:, 1:, None])[..., 0], (1, 0))

    def shares(self, batch: Batch, loss: str) -> Iterator[tuple[Tensor, StepMetrics]]:
        algorithm, size = algorithm_for(loss, self.config), self.policy.train_micro_batch_size
        temperature = self.policy.generation.temperature if algorithm.learns_from == "samples" else 1.0
        batch = self.kept.join(batch, algorithm.columns, required=not in_warmup())
        counts = Denominators(batch.number("global_valid_tokens"), batch.number("global_valid_sequences"))
        for start in range(0, batch.rows, size):
            rows = batch.select(range(start, min(start + size, batch.rows)))
            columns = {name: torch.tensor(field) for name, field in rows.fields.items() if field.ndim == 2}
            logprobs = self.logprobs_of(self.model, rows, temperature)
            share = batch_loss(algorithm, logprobs, columns, counts)
            sums, maxima = ({name: float(value) for name, value in side.items()} for side in (share.sums, share.maxima))
            yield share.loss, StepMetrics(sums, maxima)

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: str) -> StepMetrics:
        return merge_step_metrics(metrics for _, metrics in self.shares(batch, loss))

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        parts = []
        for share, metrics in self.shares(batch, loss):
            share.backward()
            parts.append(metrics)
        for weight in self.model.parameters():
            dist.all_reduce(weight.grad)
        rate = batch.number("lr") if "lr" in batch.scalars else None
        step = self.steps.take(self, rate, apply=not in_warmup())
        self.optimizer.zero_grad()
        return merge_step_metrics([*parts, StepMetrics(shared=step)])

    def gradient_norm(self) -> Tensor:
        return get_total_norm([weight.grad for weight in self.model.parameters()])

    def clip(self, limit: float, norm: Tensor) -> None:
        clip_grads_with_norm_(self.model.parameters(), limit, norm)

    def update(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def merge_metrics(self, parts: Sequence[StepMetrics]) -> StepMetrics:
        return merge_step_metrics(parts)

    @torch.no_grad()
    def keep_logprobs(self, batch: Batch, model: str) -> None:
        chosen, name = (self.model, "prev_logprobs") if model == "policy" else (self.reference, "reference_logprobs")
        found = self.logprobs_of(chosen, batch, self.policy.generation.temperature).numpy()
        if not in_warmup():
            self.kept.keep(batch, **{name: found})

    def snapshot_reference(self) -> None:
        self.reference = copy.deepcopy(self.model)

    def weight_slices(self) -> list[WeightSlice]:
        return slices_of(self.model, dtype=self.policy.precision)

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec) -> None:
        self.channel = open_channel(channel)
        self.sender = RefitSender(plan, tensors_of(self.model, dtype=self.policy.precision), self.channel)

    def send_weights(self, version: int) -> RefitReport:
        with commit_together(self.channel, wait=False):
            return self.sender.send(version)

    def save_checkpoint(self, directory: str) -> None:
        if self.context.rank == 0:
            Path(directory).mkdir(parents=True, exist_ok=True)
            torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.steps.taken], f"{directory}/state.pt")

    def load_checkpoint(self, directory: str) -> None:
        model, optimizer, self.steps.taken = torch.load(f"{directory}/state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def export_hf(self, directory: str) -> None:
        slices = [self.weight_slices()] * self.context.layout.world_size  # a whole copy on each rank
        tensors = tensors_of(self.model, dtype=self.policy.precision)
        export_hf(
            self.policy.model_name, directory, slices, tensors, self.context.rank, dist.group.WORLD, self.policy.precision
        )
