"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule around a model, and one optimizer step.

Imported only where Megatron is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
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
from dagrl.config import OptimizerConfig as OptimizerSettings
from dagrl.config.settings import samples_per_step
from dagrl.layout import ParallelLayout
from workers.megatron.cpu import cuda_type_names
from workers.megatron.cuda_graphs import ModelPass, RecordedPasses, plain_pass
from workers.megatron.model import Model
from workers.megatron.offload import Offloader, unique_storages
from workers.megatron.step import sum_gradients

logger = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6  # what torch and Megatron add to the norm before they divide the limit by it


@dataclass
class Trainer:
    """A model wrapped for training. `skipped_steps` counts steps left out because gradients were zero or not finite.

    `offloader` moves parts of its state to the host and back; `way` is how microbatches pass through the model.
    """

    model: Model
    chunks: list[Any]  # DistributedDataParallel, one for each of the model's chunks
    optimizer: Any
    scheduler: OptimizerParamScheduler
    settings: Config
    layout: ParallelLayout
    skipped_steps: int = 0
    offloader: Offloader = field(init=False)
    way: ModelPass = field(init=False)

    def __post_init__(self) -> None:
        self.offloader = Offloader(self)
        self.way = plain_pass
        if self.settings.policy.megatron_cfg.cuda_graphs:
            self.way = RecordedPasses(list(self.model.parameters().values()), self.gradient_tensors())

    def forget_recordings(self) -> None:
        """Let go of CUDA graphs, and of the memory and the communicators that they hold."""
        if isinstance(self.way, RecordedPasses):
            self.way.forget()

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def scale_gradients(self, factor: float) -> None:
        """Multiply what has been accumulated on this worker."""
        with torch.no_grad():
            for gradient in self.gradient_tensors():
                gradient.mul_(factor)

    def step(self, lr: float | None, apply: bool) -> dict[str, float]:
        """Clip the accumulated gradients and step; `grad_norm` (before clipping) and `lr`.

        With `apply` off everything but the update itself is done. A step whose gradient norm is zero, or not finite on any
        worker, is skipped on all, and counted: moments and weight decay would move weights that nothing was learned about.
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
        if not usable and apply:
            self.skipped_steps += 1
            logger.warning("gradient norm is %s: step skipped, weights unchanged (%d so far)", norm, self.skipped_steps)
        return {"grad_norm": norm, "lr": rate, "skipped_steps": float(self.skipped_steps)}

    @property
    def learning_rate(self) -> float:
        """What the schedule gives for the next step."""
        rate: float = self.scheduler.get_lr({})
        return rate

    def reset_optimizer(self) -> None:
        """Moments zero, master weights read from the model again, and the schedule at its beginning."""
        self.offloader.require(("weights", "optimizer"), "resetting the optimizer")
        for _, state in self._states():
            for value in state.values():
                value.zero_()
        with cuda_type_names():
            self.optimizer.reload_model_params()
        self.restart_schedule(0)

    def restart_schedule(self, steps: int) -> None:
        """The schedule of this run's settings, `steps` steps after its beginning."""
        self.scheduler = make_scheduler(self.optimizer, self.settings)
        self.scheduler.step(increment=steps)

    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers inside Megatron's: dense parameters, then experts."""
        return [part.optimizer for part in self.parts() if part.optimizer is not None]

    def parts(self) -> list[Any]:
        """Megatron's optimizers: it chains one for dense parameters and one for experts."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def weight_tensors(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return list(self.model.tensors().values())

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Megatron's gradient buffers; `main_grad` of every parameter is a view of one."""
        return [buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def optimizer_tensors(self) -> list[torch.Tensor]:
        """Moments, and the float32 master weights where they are not the weights themselves."""
        weights = {storage._cdata for storage in unique_storages(self.weight_tensors())}
        masters = [p.data for inner in self.inner_optimizers() for group in inner.param_groups for p in group["params"]]
        moments = [value for _, state in self._states() for value in state.values() if value.ndim]  # not the step counts
        return [tensor for tensor in (*masters, *moments) if tensor.untyped_storage()._cdata not in weights]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.chunks[0].parameters()).device
        return device

    def _states(self) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        for inner in self.inner_optimizers():
            yield from inner.state.items()

    def _gradient_norm(self) -> Tensor:
        """Of all workers' gradients, each counted once, on the device.

        Megatron's own, without Transformer Engine or Apex, reads the norm of every parameter from the device one by one.
        """
        squares: dict[dist.ProcessGroup, Tensor] = {}
        for part in self.parts():
            group, norm = part.get_grad_stats_parallel_group(), get_total_norm(part.get_main_grads_for_grad_norm())
            squares[group] = squares.get(group, 0.0) + norm.to(self._device).square()
        for group, square in squares.items():
            dist.all_reduce(square, group=group)
        return torch.stack(list(squares.values())).sum().sqrt()

    def _clip(self, total: Tensor, norm: float) -> None:
        """Scale gradients of the norm `total`, which is `norm`, to the limit; those within it are not touched."""
        limit = self.settings.policy.megatron_cfg.optimizer.clip_grad
        for part in self.parts() if 0 < limit < norm + CLIP_EPSILON else ():
            clip_grads_with_norm_(part.get_parameters(), limit, total)

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        self.optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)


def make_trainer(model: Model, settings: Config, layout: ParallelLayout) -> Trainer:
    """Wrap `model`, whose weights are loaded, for training. All optimizer state is made here, so that no step is slower."""
    megatron = settings.policy.megatron_cfg
    sharded = megatron.optimizer.use_distributed_optimizer
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=megatron.distributed_data_parallel_config.grad_reduce_in_fp32, use_distributed_optimizer=sharded
    )
    chunks = [DistributedDataParallel(model.config, ddp, chunk) for chunk in model.chunks]
    model.config.finalize_model_grads_func = sum_gradients
    with cuda_type_names(), _torch_adam():
        optimizer = get_megatron_optimizer(optimizer_config(settings), chunks, use_gloo_process_groups=False)
    trainer = Trainer(model, chunks, optimizer, make_scheduler(optimizer, settings), settings, layout)
    for inner in trainer.inner_optimizers():
        create_state(inner)
    return trainer


@contextmanager
def _torch_adam() -> Iterator[None]:
    """Let Megatron take torch's AdamW, also where Transformer Engine or Apex are installed, whose own it would prefer.

    Those count steps in a place of their own, which neither checkpoints nor `reset_optimizer` know.
    """
    usual = megatron_optimizer.USING_PYTORCH_OPTIMIZER
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        yield
    finally:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = usual


def optimizer_config(settings: Config) -> OptimizerConfig:
    """Megatron's configuration of Adam: master weights in float32 where the policy is in half precision."""
    wanted: OptimizerSettings = settings.policy.megatron_cfg.optimizer
    bf16 = settings.policy.precision == "bfloat16"
    return OptimizerConfig(
        optimizer="adam",
        lr=wanted.lr,
        min_lr=wanted.min_lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.adam_beta1,
        adam_beta2=wanted.adam_beta2,
        adam_eps=wanted.adam_eps,
        clip_grad=wanted.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=wanted.use_distributed_optimizer,
    )


def make_scheduler(optimizer: Any, settings: Config) -> OptimizerParamScheduler:
    """The schedule at its beginning; `optimizer` is any with `param_groups`."""
    megatron: MegatronConfig = settings.policy.megatron_cfg
    schedule, decay = megatron.scheduler, megatron.optimizer.weight_decay
    steps = max(schedule.lr_decay_iters or _optimizer_steps(settings), schedule.lr_warmup_iters + 1)
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


def _optimizer_steps(settings: Config) -> int:
    """Those of the whole run, or of its GRPO phase, before which the schedule begins anew."""
    if settings.algorithm == "sft":
        return settings.sft.max_num_steps
    return settings.grpo.max_num_steps * math.ceil(samples_per_step(settings) / settings.policy.train_global_batch_size)


def create_state(inner: torch.optim.Optimizer) -> None:
    """What Adam would make in its first step; on a GPU for torch's fused kernel, one pass over all it reads and writes."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            group["fused"], group["foreach"] = parameter.is_cuda, False
            state = inner.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _all_agree(condition: Tensor) -> Tensor:
    """1 where the condition holds on every worker, else 0; a collective over all of them."""
    flag = condition.float()
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return flag
