"""The section `policy.fsdp_cfg`: parallel layout, recomputation and kernels of FSDP train workers."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from dagrl.config.section import Section, derived
from dagrl.errors import LayoutError
from dagrl.runtime.layout import ParallelLayout


class FsdpLayoutConfig(Section):
    """The parallel layout of a group of FSDP workers."""

    data_parallel_size: PositiveInt = 1
    """Ranks that each train on their share of the batch. Weights, gradients and optimizer state are sharded over them."""

    data_parallel_replicas: PositiveInt = 1
    """Copies of the sharded state among the data-parallel ranks (HSDP). Each is sharded over `data_parallel_size /
    data_parallel_replicas` ranks, which are neighbours."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks over which each layer's weights are split, by the tensor-parallel plan of the model's class in transformers."""

    context_parallel_size: PositiveInt = 1
    """Ranks over which the tokens of each row are split. Attention runs on whole rows, with a part of its heads on each rank
    (Ulysses), so `tensor_parallel_size` times this size divides the number of heads."""

    expert_parallel_size: PositiveInt = 1
    """Ranks over which the experts of a mixture are distributed, by the model's expert-parallel plan: a multiple of
    `tensor_parallel_size`, up to all ranks. Ranks with the same experts shard them."""

    @property
    def layout(self) -> ParallelLayout:
        """The group's parallel layout."""
        if self.data_parallel_size % self.data_parallel_replicas:
            raise LayoutError(
                f"data_parallel_replicas is {self.data_parallel_replicas}, which does not divide data_parallel_size "
                f"{self.data_parallel_size}; each replica is sharded over equally many ranks"
            )
        tp, cp, ep = self.tensor_parallel_size, self.context_parallel_size, self.expert_parallel_size
        if ep > 1 and ep % tp:
            raise LayoutError(
                f"expert_parallel_size is {ep}, but the ranks of a tensor-parallel group have different experts; choose a "
                f"multiple of tensor_parallel_size, which is {tp}"
            )
        return ParallelLayout(dp=self.data_parallel_size, tp=tp, cp=cp, ep=ep, etp=1 if ep > 1 else None)


class FsdpConfig(FsdpLayoutConfig):
    """FSDP2 train workers: parallel layout, recomputation, kernels."""

    data_parallel_size: PositiveInt = derived(1, "the GPUs of this machine that divide a batch, if no layout is set, else 1")
    """Ranks that each train on their share of the batch. Weights, gradients and optimizer state are sharded over them."""

    activation_checkpointing: Literal["none", "full", "selective", "offloaded"] = derived(
        "none", "the first of selective, full and offloaded that makes a sequence fit the GPU, if needed"
    )
    """What the backward pass recomputes. `full`: whole layers. `selective`: all of them but attention, for long sequences.
    `offloaded`: as `selective` (as `full` without `torch_compile`), with what is kept in host memory."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, where the optimizer then runs. GPUs hold the weights of
    the layers that they compute."""

    attn_implementation: str | None = None
    """What computes attention, as transformers names it: `sdpa`, `eager`, `flex_attention`, `flash_attention_2`,
    `flash_attention_3`; or `torch_varlen`, torch's own kernel for packed rows on GPUs. null: `torch_varlen` on GPUs in half
    precision for models whose attention it computes, else transformers' choice for the model."""

    torch_compile: bool = derived(False, "true on GPUs without context parallelism")
    """Compile each layer with `torch.compile`, except those of a vision tower. Not with context parallelism, as on GPUs
    torch 2.11 compiles its exchanges to wrong gradients."""

    freeze_vision_tower: bool = False
    """Keep the weights of the part of a model that encodes images. A projector outside of it trains (Qwen's is inside)."""

    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of each layer of experts. It compares each expert's probability with its share of
    the tokens of the microbatch."""

    trust_remote_code: bool = False
    """Run Python code that the model's directory brings along, for a model that transformers does not have."""
