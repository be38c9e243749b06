"""Trainer: a model with Megatron's schedules, data-parallel wrapper and optimizer.

Every result of a microbatch is a share of a sum over the global batch (see `dagrl.rl.losses`). Gradients are summed over
microbatches, context-parallel and data-parallel workers, never averaged. Imported only where Megatron is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dagrl.attributes import setting
from dagrl.config import Config
from dagrl.runtime.layout import ParallelLayout
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.megatron.cpu import cuda_type_names
from dagrl.workers.megatron.cuda_graphs import ModelPass, RecordedPasses, plain_pass
from dagrl.workers.megatron.lora import sum_adapter_gradients
from dagrl.workers.megatron.model import ModelChunks
from dagrl.workers.megatron.router import ExpertLoad
from dagrl.workers.megatron.versions import gradients_for_norm
from dagrl.workers.train.backend import Score
from dagrl.workers.train.logprobs import TokenHead
from dagrl.workers.train.microbatches import Microbatch, Microbatches
from dagrl.workers.train.offload import StatePart, unique_storages
from dagrl.workers.train.optimizer import OptimizerSteps


@dataclass
class Trainer:
    """A `TrainedModel`; without an optimizer, one that only runs forward (`frozen_trainer`).

    `model_pass` runs one microbatch through a chunk. `load` is what the routers counted in the last training pass.
    """

    model: ModelChunks
    chunks: list[Any]  # DistributedDataParallel, one for each of the model's chunks
    optimizer: Any
    steps: OptimizerSteps
    settings: Config
    layout: ParallelLayout
    model_pass: ModelPass = field(init=False)
    load: ExpertLoad = field(init=False)

    def __post_init__(self) -> None:
        self.load = ExpertLoad(self.model.chunks, self.model.config)
        self.model_pass = plain_pass
        if self.settings.policy.megatron_cfg.cuda_graphs:
            self.model_pass = RecordedPasses(list(self.model.weights().values()), self.state("gradients"))

    def weights(self) -> dict[str, Tensor]:
        return self.model.weights()

    def head(self, temperature: float) -> TokenHead | None:
        layer = self.model.output_layer(temperature, self.settings.policy.logprob_chunk_size)
        return None if layer is None else TokenHead(lambda hidden: (hidden, layer))

    def run(self, microbatches: Microbatches, score: Score, *, backward: bool) -> list[Any]:
        """Runs Megatron's schedule over all microbatches. Returns the reports of `score` on the last stage."""
        if backward:
            with self.load.counting(microbatches):
                return self._run(microbatches, score, forward_only=False)
        reports = self._run(microbatches, score, forward_only=True)
        if self.optimizer is None:
            self.model.forget_microbatches()
        return reports

    def _run(self, batch: Microbatches, score: Score, forward_only: bool) -> list[Any]:
        def report(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, metrics = score(microbatch, output)
            no_tokens = torch.zeros((), dtype=torch.int, device=output.device)  # so Megatron does not divide
            return loss, no_tokens, metrics

        def forward(microbatches: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Any]:
            microbatch = next(microbatches)
            return self.model_pass(chunk, microbatch), partial(report, microbatch)

        iterators = [iter(batch.items) for _ in self.chunks]
        several = len(self.chunks) > 1
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(batch.items),
            seq_length=batch.shape[1],
            micro_batch_size=batch.shape[0],
            forward_only=forward_only,
        )
        return results

    def forget_recordings(self) -> None:
        """Drops CUDA graphs and the memory and communicators they hold."""
        if isinstance(self.model_pass, RecordedPasses):
            self.model_pass.forget()

    def before_offload(self, what: Sequence[str]) -> None:
        """Drops recordings, and the optimizer's own copies of gradients."""
        self.forget_recordings()
        if "gradients" in what and self.optimizer is not None:
            self.optimizer.zero_grad()

    def step_count(self) -> float:
        """Returns Adam's step count, which is equal for all parameters."""
        return max((float(state["step"]) for _, state in self._states()), default=0.0)

    def set_step_count(self, count: float) -> None:
        """Sets Adam's step count of all parameters."""
        for _, state in self._states():
            state["step"].fill_(count)

    def step_metrics(self) -> StepMetrics:
        """Returns the router's losses and the load of the experts in the last training pass."""
        return self.load.read()

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Returns Megatron's buffers of gradients."""
        return self.state("gradients")

    def gradient_norm(self) -> Tensor:
        """Returns the norm of all workers' gradients, each counted once, on the device.

        Without Transformer Engine or Apex, Megatron's own reads each parameter's norm from the device separately.
        """
        squares, device = dict[dist.ProcessGroup, Tensor](), next(self.model.chunks[0].parameters()).device
        self.optimizer.prepare_grads()
        for part in self.optimizers():
            group, norm = part.get_grad_stats_parallel_group(), get_total_norm(gradients_for_norm(part))
            squares[group] = squares.get(group, 0.0) + norm.to(device).square()
        for group, square in squares.items():
            dist.all_reduce(square, group=group)
        return torch.stack(list(squares.values())).sum().sqrt()

    def clip(self, limit: float, norm: Tensor) -> None:
        for part in self.optimizers():
            clip_grads_with_norm_(part.get_parameters(), limit, norm)

    def update(self, rate: float) -> None:
        """Updates the weights. Expert biases, which have no gradients, stay."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        self.optimizer.step_with_ready_grads()

    def reset_optimizer(self) -> None:
        for _, state in self._states():
            for value in state.values():
                value.zero_()
        self.optimizer.reload_model_params()

    def state(self, part: StatePart) -> list[Tensor]:
        """Returns the tensors of a part of the state.

        Gradients are Megatron's buffers, of which every parameter's `main_grad` is a view. The optimizer has moments, and
        float32 master weights unless they are the weights themselves.
        """
        if part == "gradients":
            if self.optimizer is None:
                return []
            return [buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        parameters = [parameter.data for chunk in self.model.chunks for parameter in chunk.parameters()]
        weights = [*parameters, *self.model.expert_biases().values()]
        if part == "weights":
            return weights
        theirs = {storage._cdata for storage in unique_storages(weights)}
        masters = [p.data for inner in self.inner_optimizers() for group in inner.param_groups for p in group["params"]]
        moments = [value for _, state in self._states() for value in state.values() if value.ndim]  # without step counts
        return [tensor for tensor in (*masters, *moments) if tensor.untyped_storage()._cdata not in theirs]

    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns the torch optimizers inside Megatron's: dense parameters, then experts."""
        return [part.optimizer for part in self.optimizers() if part.optimizer is not None]

    def optimizers(self) -> list[Any]:
        """Returns Megatron's optimizers, which it chains: one for dense parameters, one for experts."""
        if self.optimizer is None:
            return []
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def _states(self) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        for inner in self.inner_optimizers():
            yield from inner.state.items()


def make_trainer(model: ModelChunks, steps: OptimizerSteps, settings: Config, layout: ParallelLayout) -> Trainer:
    """Wraps a loaded `model` for training. Creates all optimizer state now, so that the first step is not slower."""
    megatron = settings.policy.megatron_cfg
    sharded = megatron.use_distributed_optimizer
    ddp_settings = megatron.distributed_data_parallel_config
    ddp = DistributedDataParallelConfig(**ddp_settings.model_dump(), use_distributed_optimizer=sharded)
    # Megatron reduces in buckets on the first pipeline stage and its first chunk only; the others are not critical.
    chunks = [
        DistributedDataParallel(model.config, ddp, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(model.chunks)
    ]
    # Gradients are sums: Megatron divides them by the number of tokens otherwise.
    model.config.finalize_model_grads_func = lambda chunks, _=None, **options: finalize_model_grads(chunks, None, **options)
    if settings.policy.peft.enabled:
        model.config.finalize_model_grads_func = sum_adapter_gradients
    if ddp_settings.overlap_grad_reduce:  # as in megatron/training/training.py
        no_sync = [chunk.no_sync for chunk in chunks]
        model.config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    # Torch's AdamW even if Transformer Engine or Apex are installed: these keep step counts where neither checkpoints nor
    # `reset_optimizer` find them.
    with cuda_type_names(), setting(megatron_optimizer, USING_PYTORCH_OPTIMIZER=True):
        optimizer = get_megatron_optimizer(optimizer_config(settings), chunks, use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # Megatron leaves it to its scheduler
        group["weight_decay"] = settings.policy.optimizer.weight_decay * group.get("wd_mult", 1.0)
    trainer = Trainer(model, chunks, optimizer, steps, settings, layout)
    for inner in trainer.inner_optimizers():
        create_state(inner)
    return trainer


def frozen_trainer(model: ModelChunks, settings: Config, layout: ParallelLayout) -> Trainer:
    """Returns a trainer without gradients and optimizer, for a model that only runs forward."""
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    return Trainer(model, list(model.chunks), None, OptimizerSteps(settings), settings, layout)


def optimizer_config(settings: Config) -> OptimizerConfig:
    """Returns Megatron's configuration of Adam. Half-precision policies have float32 master weights."""
    bf16 = settings.policy.precision == "bfloat16"
    return OptimizerConfig(
        optimizer="adam",
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=settings.policy.megatron_cfg.use_distributed_optimizer,
        **settings.policy.optimizer.model_dump(exclude={"name", "args", "max_skipped_steps"}),  # others are Megatron's
    )


def create_state(inner: torch.optim.Optimizer) -> None:
    """Creates the state that Adam would create in its first step. GPUs use torch's fused single-pass kernel."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            group["fused"], group["foreach"] = parameter.is_cuda, False
            state = inner.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
