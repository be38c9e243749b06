"""A plain Megatron-Core training loop, the baseline of `bench train`: a process per rank, without Ray.

Every process executes the benchmark's commands (`dagrl.bench.turns`): `build` a case, take `steps`, `end` it. The
loop is what a Megatron user writes: a GPTModel, DistributedDataParallel, Megatron's optimizer and pipeline schedule, and one
metric read per step. Layers, weights, batch, microbatches and torch's fused Adam are those of dagrl's worker; the batch is
on the device before the first step. The loss is either the worker's, whose output layer works in chunks, so that both take
the same step, or Megatron's own cross-entropy over whole logits.
"""

from __future__ import annotations

import gc
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

from dagrl.bench.turns import Told, serve
from dagrl.config import Config
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.families.megatron import padded_vocabulary


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


def _forward(microbatches: Iterator[Any], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    batch = next(microbatches)
    output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.layer_inputs)
    return output, partial(_loss, batch.data["loss_mask"])


def _forward_chunked(layer: Any, microbatches: Iterator[Any], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    from dagrl.workers.train.logprobs import token_logprobs

    batch = next(microbatches)
    hidden = model(batch.tokens, batch.positions, batch.layer_inputs)

    def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return _loss(batch.data["loss_mask"], -token_logprobs(hidden, batch.labels, layer)[0])

    return hidden, loss


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.int(), {"loss": torch.stack((total.detach(), count))}


def build(context: WorkerContext, config: Config, address: str, batch: Batch, chunked: bool) -> Loop:
    """Builds one rank's groups, model with the checkpoint's weights, optimizer and microbatches of `batch`, its shard's
    batch.

    `chunked`: use the loss of dagrl's worker.
    """
    from dagrl.workers.megatron import cpu

    cpu.adapt()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.moe import moe_utils

    from dagrl.workers.megatron.architecture import read_architecture
    from dagrl.workers.megatron.groups import start_groups
    from dagrl.workers.megatron.hf_load import load_hf, read_hf_config
    from dagrl.workers.megatron.model import build_model, transformer_config
    from dagrl.workers.megatron.trainer import create_state, make_scheduler, optimizer_config
    from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
    from dagrl.workers.train.microbatches import split_batch
    from dagrl.workers.train.row_plans import ParallelRank, SplitRule

    _take_norms_at_once()
    if not hasattr(moe_utils, "te_general_gemm"):  # as in `dagrl.workers.megatron.model.build_model`
        moe_utils.te_general_gemm = None
    layout, device = context.layout, _device()
    start_groups(context, address, config.seed)
    hf_config = read_hf_config(str(config.policy.model_name))
    architecture = read_architecture(hf_config)
    built = build_model(architecture, config.policy, layout, device) if chunked else None
    settings = built.config if built else transformer_config(architecture, config.policy, layout)
    model = built.chunks[0] if built else _whole_model(architecture, settings, layout, device)
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    slices = megatron_weight_slices(hf_config, layout, context.rank)
    load_hf(str(config.policy.model_name), slices, parameter_shapes(hf_config), tensors)
    sharded = config.policy.megatron_cfg.optimizer.use_distributed_optimizer
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    wrapped = DistributedDataParallel(settings, ddp, model)
    settings.finalize_model_grads_func = finalize_model_grads
    with cpu.cuda_type_names():
        optimizer = get_megatron_optimizer(optimizer_config(config), [wrapped], use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        create_state(part.optimizer)
    rule = SplitRule.of(config.policy, "train")
    groups = parallel_state.get_context_parallel_group(), parallel_state.get_data_parallel_group()
    cut = split_batch(batch, rule, ParallelRank(layout, context.coordinates, *groups, device))
    forward = partial(_forward_chunked, built.output_layer(1.0, None)) if built else _forward
    return Loop(wrapped, optimizer, make_scheduler(optimizer, config), cut, forward)


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


def _whole_model(architecture: Any, settings: Any, layout: Any, device: torch.device) -> Any:
    """Returns Megatron's GPTModel with its output layer."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from dagrl.workers.megatron.model import inverse_frequencies, layer_specs

    model = GPTModel(
        config=settings,
        transformer_layer_spec=layer_specs(settings, None),
        vocab_size=padded_vocabulary(architecture.vocabulary, layout.tp),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope["rope_theta"],
    ).to(device)
    model.rotary_pos_emb.inv_freq = inverse_frequencies(architecture).to(device)
    return model


def take_steps(loop: Loop, count: int) -> dict[str, Any]:
    """Returns the seconds and losses of `count` steps, and the peak of memory in bytes."""
    from dagrl.workers.megatron.cpu import cuda_type_names

    seconds, losses = [], []
    with cuda_type_names():
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            losses.append(loop.step())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"seconds": seconds, "losses": losses, "peak": peak}


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def work(told: Told) -> None:
    """Executes the benchmark's commands until the end. An error is reported and does not end the process."""
    from dagrl.workers.megatron.groups import end_groups

    warnings.simplefilter("ignore")
    loop: Loop | None = None
    while (command := told.turn()) is not None:
        name, *arguments = command
        try:
            result: Any = None
            if name == "build":
                loop = build(*arguments)
            elif name == "steps":
                assert loop is not None
                result = take_steps(loop, *arguments)
            else:
                loop = None
                gc.collect()
                end_groups()
                torch.cuda.empty_cache()
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
            told.answer(result)
        except Exception:
            told.fail()


if __name__ == "__main__":
    serve(work)
