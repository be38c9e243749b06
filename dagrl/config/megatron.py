"""The section `policy.megatron_cfg`: parallel layout and recomputation of Megatron train workers."""

from pydantic import NonNegativeFloat, PositiveInt

from dagrl.config.section import Section, derived
from dagrl.runtime.layout import ParallelLayout


class DistributedDataParallelConfig(Section):
    """Megatron's data-parallel wrapper."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32. false: in `policy.precision`."""

    overlap_grad_reduce: bool = False
    """Reduce each bucket of gradients while the backward pass computes the next one."""


class LayoutConfig(Section):
    """The parallel layout of a group of Megatron workers."""

    data_parallel_size: PositiveInt = 1
    """Replicas of the model, each with its share of the batch."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks over which each layer's weights are split."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Pipeline stages."""

    context_parallel_size: PositiveInt = 1
    """Ranks over which each sequence is split."""

    expert_model_parallel_size: PositiveInt = 1
    """Ranks over which the experts of a mixture-of-experts layer are distributed."""

    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks over which each expert's weights are split. null: `tensor_model_parallel_size`."""

    sequence_parallel: bool = False
    """Split activations outside attention and MLP over the tensor-parallel ranks, along the sequence."""


class MegatronConfig(LayoutConfig):
    """Megatron train workers: parallel layout, recomputation, kernels."""

    data_parallel_size: PositiveInt = derived(1, "the GPUs of this machine that divide a batch, if no layout is set, else 1")
    """Replicas of the model, each trained on its share of the batch."""

    use_distributed_optimizer: bool = derived(False, "true if `data_parallel_size` is derived and above 1, else false")
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""

    virtual_pipeline_model_parallel_size: PositiveInt = 1
    """Model chunks of each pipeline stage, for the interleaved schedule."""

    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline stage. null: as many as the middle stages."""

    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline stage. null: as many as the middle stages."""

    activation_checkpointing: bool = derived(False, "true if a sequence does not fit the GPU without, else false")
    """Recompute activations in the backward pass. Saves memory and runs the recomputed layers twice."""

    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of each layer of experts. It compares each expert's probability with its share of
    the tokens of the microbatch."""

    cuda_graphs: bool = False
    """Replay a microbatch's forward and backward pass as CUDA graphs. Not with pipeline parallelism; each worker must have
    all experts."""

    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()

    @property
    def layout(self) -> ParallelLayout:
        """The train group's parallel layout."""
        return ParallelLayout(
            dp=self.data_parallel_size,
            pp=self.pipeline_model_parallel_size,
            tp=self.tensor_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            vpp=self.virtual_pipeline_model_parallel_size,
            first_stage_layers=self.num_layers_in_first_pipeline_stage,
            last_stage_layers=self.num_layers_in_last_pipeline_stage,
        )
