"""A plain Megatron-Core training loop, the baseline of `bench train`: a process for each rank, without Ray.

The loop is what a Megatron user writes: DistributedDataParallel, Megatron's optimizer and pipeline schedule, and one metric
read per step. Model, loss, weights, batch, microbatches and torch's fused Adam are those of dagrl's worker, so both take the
same step; the batch is on the device before the first one.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from dagrl import Batch, ParallelLayout, WorkerContext
from dagrl.bench.harness import answer
from dagrl.bench.workloads import rows
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.data.tokenization import collate, encode_demonstrations


@dataclass
class Loop:
    """One rank of the plain loop."""

    model: Any
    optimizer: Any
    scheduler: Any
    microbatches: Any
    forward: Callable[..., Any]

    def step(self) -> float:
        """Takes one optimizer step and returns the mean loss, on the last pipeline stage."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=iter(self.microbatches.items),
            model=self.model,
            num_microbatches=len(self.microbatches.items),
            seq_length=self.microbatches.shape[1],
            micro_batch_size=self.microbatches.shape[0],
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(increment=1)
        if not parts:
            return 0.0
        sums = torch.stack([part["loss"] for part in parts]).sum(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        total, count = sums.tolist()
        return float(total / count)


def _forward(layer: Any, microbatches: Iterator[Any], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    from dagrl.workers.megatron.attention import LayerInputs
    from dagrl.workers.train.logprobs import token_logprobs

    batch = next(microbatches)
    hidden = model(batch.tokens, batch.positions, LayerInputs.of(batch))

    def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return _loss(batch.data["loss_mask"], -token_logprobs(hidden, batch.labels, layer)[0])

    return hidden, loss


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.int(), {"loss": torch.stack((total.detach(), count))}


def build(context: WorkerContext, config: Config, address: str, batch: Batch) -> Loop:
    """Builds one rank's groups, model with the checkpoint's weights, optimizer and microbatches of `batch`, its shard's
    batch."""
    from dagrl.workers.megatron import cpu

    cpu.adapt()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer

    from dagrl.workers.megatron.architecture import read_architecture
    from dagrl.workers.megatron.groups import start_groups
    from dagrl.workers.megatron.model import build_model
    from dagrl.workers.megatron.trainer import create_state, optimizer_config
    from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
    from dagrl.workers.train.hf_load import load_hf, read_hf_config
    from dagrl.workers.train.microbatches import split_batch
    from dagrl.workers.train.row_plans import ParallelRank, SplitRule

    _take_norms_at_once()
    layout, device = context.layout, _device()
    start_groups(context, address, config.seed)
    hf_config = read_hf_config(str(config.policy.model_name))
    built = build_model(read_architecture(hf_config), config.policy, layout, device)
    (model,) = built.chunks
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    slices = megatron_weight_slices(hf_config, layout, context.rank)
    load_hf(str(config.policy.model_name), slices, parameter_shapes(hf_config), tensors)
    sharded = config.policy.megatron_cfg.use_distributed_optimizer
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    wrapped = DistributedDataParallel(built.config, ddp, model)
    built.config.finalize_model_grads_func = finalize_model_grads
    with cpu.cuda_type_names():
        optimizer = get_megatron_optimizer(optimizer_config(config), [wrapped], use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        create_state(part.optimizer)
    rule = SplitRule.of(config.policy, "train")
    groups = parallel_state.get_context_parallel_group(), parallel_state.get_data_parallel_group()
    cut = split_batch(batch, rule, ParallelRank(layout, context.coordinates, *groups, device))
    forward = partial(_forward, built.output_layer(1.0, None))
    return Loop(wrapped, optimizer, _scheduler(optimizer, config), cut, forward)


def _scheduler(optimizer: Any, config: Config) -> Any:
    """Returns Megatron's schedule, at the peak all the time."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    wanted = config.policy.optimizer
    rates = {"init_lr": 0.0, "max_lr": wanted.lr, "min_lr": wanted.min_lr, "lr_warmup_steps": 0, "lr_decay_steps": 1}
    decay = {"start_wd": wanted.weight_decay, "end_wd": wanted.weight_decay, "wd_incr_steps": 0, "wd_incr_style": "constant"}
    return OptimizerParamScheduler(optimizer, lr_decay_style="constant", **rates, **decay)


def _take_norms_at_once() -> None:
    """Computes all gradient norms in one call if neither Transformer Engine nor Apex is installed.

    Megatron would then copy each gradient's norm to the host separately. That would be an unfair baseline, and torch does
    what the missing kernels do.
    """
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl.__name__.startswith("local_"):
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale


def _norm(chunk: int, overflow: Tensor, tensors: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    return get_total_norm(tensors[0]).float().reshape(1), None


def _scale(chunk: int, overflow: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Scales in place: Megatron passes the gradients as both source and destination."""
    assert all(source is target for source, target in zip(*tensors, strict=True))
    torch._foreach_mul_(tensors[0], factor)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def work(config: str, address: str, layout: dict[str, Any], rank: int, steps: int) -> dict[str, Any]:
    """Returns the seconds and losses of this rank's steps, and the peak of its GPU memory."""
    from dagrl.workers.megatron.cpu import cuda_type_names

    warnings.simplefilter("ignore")
    settings, sizes = load_config(config), ParallelLayout(**layout)
    context = WorkerContext("train", rank, sizes, settings.seed, 60.0)
    loop = build(context, settings, address, shard_of(settings, context))
    seconds, losses = [], []
    with cuda_type_names():
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            losses.append(loop.step())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"seconds": seconds, "losses": losses, "peak_bytes": peak}


def shard_of(config: Config, context: WorkerContext) -> Batch:
    """Returns the rows of a data-parallel shard, as `dagrl train` makes them of the task."""
    from transformers import AutoTokenizer

    sizes: dict[str, Any] = config.data.task_args
    examples = rows(**sizes).demonstrations
    whole = collate(encode_demonstrations(examples, AutoTokenizer.from_pretrained(str(config.policy.model_name))))
    mask = whole["loss_mask"]
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(len(mask))}
    return whole.with_scalars(**scalars).select(range(context.coordinates.dp, whole.rows, context.layout.dp))


if __name__ == "__main__":
    answer(work)
