"""Trainer: a model with Megatron's data-parallel wrapper, optimizer and learning-rate schedule; one optimizer step.

Imported only where Megatron is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dagrl.config import Config, MegatronConfig
from dagrl.config.settings import optimizer_steps
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.cpu import cuda_type_names
from dagrl.workers.megatron.cuda_graphs import ModelPass, RecordedPasses, plain_pass
from dagrl.workers.megatron.forward_backward import sum_gradients
from dagrl.workers.megatron.lora import sum_adapter_gradients
from dagrl.workers.megatron.model import ModelChunks
from dagrl.workers.megatron.router import StepCounts
from dagrl.workers.train.offload import Offloader, unique_storages

logger = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6  # added to the norm before the limit is divided by it, as in torch and Megatron


@dataclass
class Trainer:
    """A model wrapped for training, or, without an optimizer, one that only runs forward (`frozen_trainer`).

    `skipped_steps` counts steps skipped for zero or non-finite gradients. Routers count a step in `step_counts`.

    `offloader` moves parts of its state to the host and back; `model_pass` runs one microbatch through the model.
    """

    model: ModelChunks
    chunks: list[Any]  # DistributedDataParallel, one for each of the model's chunks
    optimizer: Any
    scheduler: OptimizerParamScheduler
    settings: Config
    layout: ParallelLayout
    skipped_steps: int = 0
    step_counts: StepCounts | None = None  # of the largest batch so far
    offloader: Offloader = field(init=False)
    model_pass: ModelPass = field(init=False)

    def __post_init__(self) -> None:
        self.offloader = Offloader(
            self._device,
            {"weights": self.weight_tensors, "gradients": self.gradient_tensors, "optimizer": self.optimizer_tensors},
        )
        self.model_pass = plain_pass
        if self.settings.policy.megatron_cfg.cuda_graphs:
            self.model_pass = RecordedPasses(list(self.model.weights().values()), self.gradient_tensors())

    def forget_recordings(self) -> None:
        """Drops CUDA graphs and the memory and communicators they hold."""
        if isinstance(self.model_pass, RecordedPasses):
            self.model_pass.forget()

    def offload(self, what: Sequence[str]) -> None:
        """Moves parts of the state to the host and frees their device memory, and what no tensor uses."""
        if what:
            self.forget_recordings()
        if "gradients" in what and self.optimizer is not None:
            self.optimizer.zero_grad()  # the optimizer's own copies
        self.offloader.offload(what)

    def finish_param_gather(self) -> None:
        """Completes the all-gather of parameters that an overlapped step left to the next forward pass. A collective."""
        overlaps = self.settings.policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather
        if not overlaps or self.optimizer is None:
            return
        for chunk in self.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def zero_gradients(self) -> None:
        """Sets all gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, lr: float | None, apply: bool, on_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Clips the accumulated gradients and updates the weights. Returns `grad_norm` (before clipping) and `lr`.

        `on_update` changes what has no gradients; it runs after the update, on every worker or on none.

        Without `apply`, does everything but the update. A step whose gradient norm is zero, or not finite on any worker, is
        skipped on all and counted: otherwise moments and weight decay would change weights without a learning signal.
        """
        rate = lr if lr is not None else self.learning_rate
        self.offloader.require(("optimizer",), "an optimizer step")
        with cuda_type_names(), torch.no_grad():
            self.optimizer.prepare_grads()
            total = self._gradient_norm()
            norm, usable = torch.stack([total, _all_agree(torch.isfinite(total) & (total > 0))]).tolist()
            if usable:
                self._clip(total, norm)
            if usable and apply:
                self._update(rate)
                on_update()
        if not usable and apply:
            self.skipped_steps += 1
            logger.warning("gradient norm is %s: step skipped, weights unchanged (%d so far)", norm, self.skipped_steps)
        return {"grad_norm": norm, "lr": rate, "skipped_steps": float(self.skipped_steps)}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        rate: float = self.scheduler.get_lr({})
        return rate

    def reset_optimizer(self) -> None:
        """Zeros the moments, copies master weights from the model and restarts the schedule."""
        self.offloader.require(("weights", "optimizer"), "resetting the optimizer")
        for _, state in self._states():
            for value in state.values():
                value.zero_()
        with cuda_type_names():
            self.optimizer.reload_model_params()
        self.restart_schedule(0)

    def restart_schedule(self, steps: int) -> None:
        """Creates the schedule from this run's settings, advanced by `steps`."""
        self.scheduler = make_scheduler(self.optimizer, self.settings)
        self.scheduler.step(increment=steps)

    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns the torch optimizers inside Megatron's: dense parameters, then experts."""
        return [part.optimizer for part in self.optimizers() if part.optimizer is not None]

    def optimizers(self) -> list[Any]:
        """Returns Megatron's optimizers, which it chains: one for dense parameters, one for experts."""
        if self.optimizer is None:
            return []
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def weight_tensors(self) -> list[torch.Tensor]:
        """Returns the model's parameters, adapters and expert biases."""
        parameters = [parameter.data for chunk in self.model.chunks for parameter in chunk.parameters()]
        return [*parameters, *self.model.expert_biases().values()]

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Returns Megatron's gradient buffers. `main_grad` of every parameter is a view of one."""
        if self.optimizer is None:
            return []
        return [buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def optimizer_tensors(self) -> list[torch.Tensor]:
        """Returns moments, and float32 master weights unless they are the weights themselves."""
        weights = {storage._cdata for storage in unique_storages(self.weight_tensors())}
        masters = [p.data for inner in self.inner_optimizers() for group in inner.param_groups for p in group["params"]]
        moments = [value for _, state in self._states() for value in state.values() if value.ndim]  # without step counts
        return [tensor for tensor in (*masters, *moments) if tensor.untyped_storage()._cdata not in weights]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.chunks[0].parameters()).device
        return device

    def _states(self) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        for inner in self.inner_optimizers():
            yield from inner.state.items()

    def _gradient_norm(self) -> Tensor:
        """Returns the norm of all workers' gradients, each counted once, on the device.

        Without Transformer Engine or Apex, Megatron's own reads each parameter's norm from the device separately.
        """
        squares: dict[dist.ProcessGroup, Tensor] = {}
        for part in self.optimizers():
            group, norm = part.get_grad_stats_parallel_group(), get_total_norm(part.get_main_grads_for_grad_norm())
            squares[group] = squares.get(group, 0.0) + norm.to(self._device).square()
        for group, square in squares.items():
            dist.all_reduce(square, group=group)
        return torch.stack(list(squares.values())).sum().sqrt()

    def _clip(self, total: Tensor, norm: float) -> None:
        """Scales gradients to the limit if their norm exceeds it. `total` is `norm` on the device."""
        limit = self.settings.policy.megatron_cfg.optimizer.clip_grad
        for part in self.optimizers() if 0 < limit < norm + CLIP_EPSILON else ():
            clip_grads_with_norm_(part.get_parameters(), limit, total)

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        self.optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)


def make_trainer(model: ModelChunks, settings: Config, layout: ParallelLayout) -> Trainer:
    """Wraps a loaded `model` for training. Creates all optimizer state now, so that the first step is not slower."""
    megatron = settings.policy.megatron_cfg
    sharded = megatron.optimizer.use_distributed_optimizer
    wanted = megatron.distributed_data_parallel_config
    ddp = DistributedDataParallelConfig(**wanted.model_dump(), use_distributed_optimizer=sharded)
    # Megatron reduces in buckets on the first pipeline stage and its first chunk only; the others are not critical.
    chunks = [
        DistributedDataParallel(model.config, ddp, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(model.chunks)
    ]
    model.config.finalize_model_grads_func = sum_gradients
    if megatron.peft.enabled:
        model.config.finalize_model_grads_func = sum_adapter_gradients
    if wanted.overlap_grad_reduce:  # as in megatron/training/training.py
        no_sync = [chunk.no_sync for chunk in chunks]
        model.config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    if wanted.overlap_param_gather and not model.architecture.scalar:
        _wait_for_output_weight(chunks[-1])
    with cuda_type_names(), _torch_adam():
        optimizer = get_megatron_optimizer(optimizer_config(settings), chunks, use_gloo_process_groups=False)
    trainer = Trainer(model, chunks, optimizer, make_scheduler(optimizer, settings), settings, layout)
    for inner in trainer.inner_optimizers():
        create_state(inner)
    return trainer


def frozen_trainer(model: ModelChunks, settings: Config, layout: ParallelLayout) -> Trainer:
    """Returns a trainer without gradients and optimizer, for a model that only runs forward."""
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    return Trainer(model, list(model.chunks), None, None, settings, layout)


def _wait_for_output_weight(chunk: Any) -> None:
    """Gathers the output layer's weight before the last norm runs.

    Megatron gathers a parameter when its module is called. Log-probabilities read the output weight directly.
    """
    model = chunk.module
    if model.post_process:
        group = chunk.param_to_bucket_group[model.output_weight()]
        model.decoder.final_layernorm.register_forward_pre_hook(lambda *_: group.finish_param_sync())


@contextmanager
def _torch_adam() -> Iterator[None]:
    """Makes Megatron use torch's AdamW even if Transformer Engine or Apex are installed.

    Their optimizers keep step counts where neither checkpoints nor `reset_optimizer` find them.
    """
    usual = megatron_optimizer.USING_PYTORCH_OPTIMIZER
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        yield
    finally:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = usual


def optimizer_config(settings: Config) -> OptimizerConfig:
    """Returns Megatron's configuration of Adam. Half-precision policies have float32 master weights."""
    megatron, bf16 = settings.policy.megatron_cfg, settings.policy.precision == "bfloat16"
    return OptimizerConfig(
        optimizer="adam",
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        overlap_param_gather=megatron.distributed_data_parallel_config.overlap_param_gather,
        **megatron.optimizer.model_dump(),  # its keys are Megatron's
    )


def make_scheduler(optimizer: Any, settings: Config) -> OptimizerParamScheduler:
    """Returns a new schedule. `optimizer` is any object with `param_groups`."""
    megatron: MegatronConfig = settings.policy.megatron_cfg
    schedule, decay = megatron.scheduler, megatron.optimizer.weight_decay
    steps = max(schedule.lr_decay_iters or optimizer_steps(settings), schedule.lr_warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=megatron.optimizer.lr,
        min_lr=megatron.optimizer.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def create_state(inner: torch.optim.Optimizer) -> None:
    """Creates the state that Adam would create in its first step. GPUs use torch's fused single-pass kernel."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            group["fused"], group["foreach"] = parameter.is_cuda, False
            state = inner.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _all_agree(condition: Tensor) -> Tensor:
    """Returns 1 if the condition holds on every worker, else 0. A collective over all workers."""
    flag = condition.float()
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return flag
