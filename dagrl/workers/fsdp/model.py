"""Builds this rank's part of a transformers model under FSDP2, and loads its weights.

`load_model` lets transformers read the checkpoint, into a model that is sharded before: each rank reads its own part. Tensor
parallelism and expert parallelism are transformers' own, by the plan of the model's class. FSDP2 shards each layer over the
data-parallel ranks, and embedding, last norm and output layer together at the root; a single rank shards nothing. Trained
weights are float32, and the optimizer updates each rank's shards; layers compute with copies in `policy.precision`. Imported
only where torch is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import DistributedConfig, PreTrainedModel, activations
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, Interleave
from transformers.distributed.tensor_parallel import TensorParallelLayer, apply_tensor_parallelism
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from dagrl.config import FsdpConfig, PolicyConfig
from dagrl.errors import CheckpointError, ConfigError, error_text
from dagrl.refit.sources import held_boxes, local_of
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCORE, constant_row
from dagrl.workers.fsdp.architecture import find_class, find_config, vision_tower
from dagrl.workers.fsdp.attention import attention_arguments, default_attention, shared_masks
from dagrl.workers.fsdp.context import Context
from dagrl.workers.fsdp.copies import ComputeCopies, HostCopies
from dagrl.workers.fsdp.experts import use_permutations
from dagrl.workers.fsdp.lora import add_adapters, is_adapter, moved_names, split_adapters
from dagrl.workers.fsdp.media import MediaInputs, text_positions
from dagrl.workers.fsdp.output import LogitTransform, base_of
from dagrl.workers.fsdp.versions import apply_expert_parallelism, parallel_plans, plan_key
from dagrl.workers.train import cudnn_attention, prefix_attention
from dagrl.workers.train.hf_load import check_finite, read_hf_config
from dagrl.workers.train.microbatches import Segments

REPLICATE, SHARD, TENSOR, CONTEXT = "replicate", "shard", "tp", "cp"
EXPERT_SHARD, EXPERT = "expert_shard", "ep"
"""Dimensions of the meshes."""

DISPATCH = "ep_dispatch_experts"
"""The style in transformers' plans by which tokens go to the ranks of their experts. By the other, the ranks of a
tensor-parallel group each compute their own experts for the tokens that they share."""

SCALAR_HEAD = "score"


class HiddenStates(nn.Module):
    """The root of a sharded model: runs `net`, a transformers model with a head, up to the head.

    `forward` leaves the root's weights whole, so that the head can be computed from its output: until the backward pass has
    reduced their gradients, or until `reshard`. `copies` are those of a model that is not sharded.
    """

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.net = net
        self.context: Context | None = None
        self.copies: ComputeCopies | None = None
        self.media: MediaInputs | None = None
        self.logits = None if hasattr(net, SCALAR_HEAD) else LogitTransform(net)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Segments | None = None,
        row_positions: Tensor | None = None,
        media: Tensor | None = None,
    ) -> Tensor:
        """Returns the last hidden states [b, s, hidden size] for `tokens` and `positions` [b, s].

        `segments` are the sequences of a packed row, which positions tell apart where attention does not take them and none
        share a prefix.
        `row_positions` are those of whole rows, of which context-parallel ranks have a run of `s` tokens each. `media` are
        the ids [b, s] of the images that tokens stand for.
        """
        if self.copies is not None:
            self.copies.gather()
        base = base_of(self.net)
        arguments = attention_arguments(self.net.config, segments, row_positions)
        shares = segments is not None and segments.prefixes is not None and not arguments
        arguments["position_ids"] = text_positions(base, positions)
        nothing = None
        ids: AbstractContextManager[Tensor] = nullcontext(tokens)
        if self.media is not None and media is not None:
            arguments |= self.media.arguments(tokens, positions, media, segments)
            ids = self.media.input_ids(tokens, media)
            nothing = None if bool((media != 0).any()) else self.media.nothing(tokens.device)
        split = self.context is not None and row_positions is not None
        with self.context.whole_rows(row_positions) if split else nullcontext():  # type: ignore[union-attr, arg-type]
            implementation = self.net.config._attn_implementation
            masks = shared_masks(implementation, segments, positions) if shares else nullcontext()  # type: ignore[arg-type]
            with masks, ids as input_ids:
                output = base(input_ids=input_ids, use_cache=False, **arguments)
        hidden: Tensor = output.last_hidden_state
        return hidden if nothing is None else hidden + nothing.to(hidden.dtype)


@dataclass(frozen=True)
class Meshes:
    """All ranks in the order of `ParallelLayout`: as dense weights are on them, and as experts are, if these are apart.

    Context-parallel ranks hold weights as data-parallel ones do. `data`: the group of both, over replicas and shards.
    `context`: the group of the ranks with runs of the same rows, if there are several.
    """

    dense: DeviceMesh
    experts: DeviceMesh | None
    data: ProcessGroup
    context: ProcessGroup | None

    @staticmethod
    def of(layout: ParallelLayout, replicas: int, device: torch.device) -> Meshes:
        """Makes the meshes. A collective."""
        sizes = replicas, layout.dp // replicas * layout.cp, layout.tp
        dense = init_device_mesh(device.type, sizes, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
        experts = None
        if layout.ep > 1:
            shape = layout.world_size // layout.ep, layout.ep
            experts = init_device_mesh(device.type, shape, mesh_dim_names=(EXPERT_SHARD, EXPERT))
        data = dense[SHARD] if replicas == 1 else dense[REPLICATE, SHARD]._flatten("data")
        context = None
        if layout.cp > 1:
            names = ("dp", CONTEXT, TENSOR)
            rows = init_device_mesh(device.type, (layout.dp, layout.cp, layout.tp), mesh_dim_names=names)
            context = rows[CONTEXT].get_group()
        return Meshes(dense, experts, data.get_group(), context)

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards dense weights."""
        return self.dense[SHARD] if self.dense.size(0) == 1 else self.dense[REPLICATE, SHARD]


def forget_meshes() -> None:
    """Makes torch forget meshes, whose groups end: DTensor gives the first of equal ones."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def load_model(
    directory: Path, policy: PolicyConfig, meshes: Meshes, device: torch.device, *, scalar: bool, trains: bool
) -> HiddenStates:
    """Loads the model in `directory`. `scalar`: with one number per token in place of the vocabulary's head."""
    disable_progress_bar()
    set_verbosity_error()  # what its report of the files says is checked here
    adapted = trains and policy.peft.enabled
    dtype = torch.float32 if trains and not adapted else getattr(torch, policy.precision)
    root: HiddenStates

    def shard(model: PreTrainedModel) -> None:
        nonlocal root
        root = shard_model(model, policy, meshes, device, trains=trains)

    config = find_config(policy, read_hf_config(directory), scalar=scalar)
    home, kind = torch.device("cpu") if policy.fsdp_cfg.cpu_offload else device, find_class(policy, config, scalar=scalar)
    attention = policy.fsdp_cfg.attn_implementation or default_attention(kind, config, device, policy.precision)
    loaded, report = sharded_class(kind, home, shard).from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        distributed_config=DistributedConfig(),
        key_mapping=moved_names(kind, config, policy.peft) if adapted else None,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    sharded = sharded_modules(root)
    reordered = reordered_patterns(root.net, [name for name, *_ in report["mismatched_keys"]]) if sharded else []
    if reordered:
        plain = kind.from_pretrained(directory, config=config, dtype=dtype)  # in host memory
        for name, parameter in root.net.named_parameters():
            if any(re.search(pattern, name) for pattern in reordered):
                fill(name, parameter, plain.get_parameter(name.replace(".base_layer", "")).detach())
    report["mismatched_keys"] = [
        one for one in report["mismatched_keys"] if not any(re.search(pattern, one[0]) for pattern in reordered)
    ]
    check_report(directory, report)
    new = report["missing_keys"]
    check_finite(directory, [(name, local_of(one.detach())) for name, one in loaded.named_parameters() if name not in new])
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and trains and is_adapter(name) == adapted)
    if trains and policy.fsdp_cfg.freeze_vision_tower and (tower := vision_tower(loaded)) is not None:
        tower.requires_grad_(False)
    embedding: Any = loaded.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = constant_row(config.get_text_config().to_dict())
    if policy.fsdp_cfg.cpu_offload:
        root.cpu()  # DTensors are read onto the device of their mesh
    for buffer in loaded.buffers():
        buffer.data = buffer.to(device)
    fix_rotary_factors(loaded, policy)
    for module in sharded:  # settles the memory of the shards, which FSDP2 pads
        module.unshard()
        module.reshard()
    if not sharded and trains:
        precision = getattr(torch, policy.precision)
        if device.type == "cuda" and policy.fsdp_cfg.activation_checkpointing == "none":
            from dagrl.workers.fsdp.heads import fuse_attention

            fuse_attention(root.net, precision)
        root.copies = ComputeCopies(root, precision)
    return root


def check_report(directory: Path | str, report: Mapping[str, Collection[Any]]) -> None:
    """Raises CheckpointError for what transformers has not loaded (`output_loading_info`). A scalar head and adapters may be
    new."""
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{directory}: parameter {name!r} has shape {list(found)}, expected {list(expected)}; config.json and the "
            "weights belong to different models, or experts are missing"
        )
    if lacking := sorted(name for name in report["missing_keys"] if name != SCORE and not is_adapter(name)):
        others = f" and {len(lacking) - 1} other parameters" if lacking[1:] else ""
        raise CheckpointError(
            f"{directory} lacks {lacking[0]!r}{others}, wholly or in part, but config.json defines them; the files are "
            "incomplete, or belong to another model"
        )


def fix_rotary_factors(model: nn.Module, policy: PolicyConfig) -> None:
    """Chooses long or short factors of rotary frequencies (LongRoPE, Phi) by the longest sequence of the run, as vLLM does.

    Transformers would choose by the longest row of each microbatch.
    """
    engine = policy.generation.vllm_cfg.max_model_len if policy.generation is not None else None
    longest = engine or policy.max_total_sequence_length
    for part in model.modules():
        if getattr(part, "rope_type", None) != "longrope":
            continue
        config: Any = part.config
        if longest > config.rope_parameters["original_max_position_embeddings"]:
            buffer: Any = part.original_inv_freq
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, buffer.device, seq_len=longest)
            buffer.copy_(frequencies)  # which transformers takes for short rows


def init_scalar_head(root: HiddenStates, seed: int) -> None:
    """Draws a scalar head from a normal distribution, the same as in any other layout."""
    weight: Tensor = getattr(root.net, SCALAR_HEAD).weight
    generator = torch.Generator().manual_seed(seed)
    fill(SCALAR_HEAD, weight, torch.empty(weight.shape).normal_(0, root.net.config.initializer_range, generator=generator))


def reordered_patterns(model: PreTrainedModel, mismatched: Collection[str]) -> list[str]:
    """Returns patterns of the parameters that transformers does not read right into shards.

    Those that it joins or cuts along dimension 0 (`core_model_loading.py` of 5.19): it does so with the rows that each rank
    has read, which are then others than its own. And of the `mismatched` ones those that it transposes if they have another
    shape than the whole parameter, as a rank's rows always have.
    """
    operations, patterns = (Chunk, Concatenate, Interleave), []
    for transform in get_model_conversion_mapping(model):
        own = [re.escape(pattern).replace(r"\*", r"\d+") for pattern in transform.target_patterns]
        for step in getattr(transform, "operations", ()):
            if isinstance(step, operations) and step.dim == 0:
                patterns += own
            elif getattr(step, "check_dims", False):
                patterns += [pattern for pattern in own if any(re.search(pattern, name) for name in mismatched)]
    return patterns


def fill(name: str, parameter: Tensor, whole: Tensor) -> None:
    """Copies this rank's part of a `whole` parameter."""
    for box, at in held_boxes(name, parameter):
        local_of(parameter.detach())[tuple(slice(*run) for run in at)] = whole[tuple(slice(*run) for run in box)]


@torch.no_grad()
def check_context(root: HiddenStates, device: torch.device, *, packed: bool) -> None:
    """Raises ConfigError if context-parallel ranks do not compute what a rank does that has the whole row. A collective."""
    context = root.context
    if context is None:
        return
    width = 8 * context.size
    lengths = (width - 5, 5) if packed else (width,)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    tokens = (7 * torch.arange(width, device=device)[None] + 3) % root.net.config.get_text_config().vocab_size
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    segments = Segments(lengths, lengths, starts, starts, None) if packed else None
    own = slice(8 * context.rank, 8 * (context.rank + 1))
    reason = ""
    try:
        with context.disabled():
            whole = root(tokens, positions, segments)[:, own].float()
        part = root(tokens[:, own], positions[:, own], segments, positions).float()
        if not (part - whole).norm() <= 0.02 * whole.norm():  # experts see another batch, and round differently
            reason = "other layers than attention mix tokens, or attention depends on more than queries, keys and values"
    except (RuntimeError, ValueError, TypeError) as error:  # of shapes that do not fit
        reason = error_text(error)
    reshard(root)
    if reason:
        raise ConfigError(
            f"{type(root.net).__name__} does not run with rows split over policy.fsdp_cfg.context_parallel_size "
            f"{context.size}: {reason}; set it to 1"
        )


def shard_model(
    model: PreTrainedModel, policy: PolicyConfig, meshes: Meshes, device: torch.device, *, trains: bool
) -> HiddenStates:
    """Shards a model whose weights may be on the meta device, if there are several ranks. Returns its root."""
    settings = policy.fsdp_cfg
    use_permutations(model)
    apart = split_layers(model, settings, meshes)
    if trains and policy.peft.enabled:
        add_adapters(model, policy.peft)
        if settings.tensor_parallel_size > 1:
            split_adapters(model, model.tp_plan, meshes.dense[TENSOR])
    root, vision, copies = HiddenStates(model), vision_tower(model), None
    tower = set() if vision is None else {*vision.modules()}
    for layer in find_layers(model):
        copies = prepare_layer(layer, settings, copies, compiles=settings.torch_compile and layer not in tower)
    for part in model.get_decoder().children():
        if settings.torch_compile and type(part).__name__.endswith("Norm"):  # the last one
            part.forward = torch.compile(part.forward)
    model.tie_weights()  # before, so that FSDP2 gathers a tied weight once
    on_host = settings.cpu_offload and device.type != "cpu"
    if settings.layout.world_size == 1 and not on_host:
        return root
    options: dict[str, Any] = {}
    if trains and policy.precision != "float32":
        precision = getattr(torch, policy.precision)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    if on_host:
        options["offload_policy"] = CPUOffloadPolicy()
    for experts in apart:
        assert meshes.experts is not None, "experts are apart"
        fully_shard(experts, mesh=meshes.experts[EXPERT_SHARD], **options)
    options["mesh"] = meshes.sharding
    if meshes.dense[SHARD].size() == 1:
        options["reshard_after_forward"] = False  # there would be little to free
    for layer in find_layers(model):
        fully_shard(layer, **options)
    fully_shard(root, **options)
    if meshes.context is not None:
        root.context = Context(model, meshes.context)
    for module in sharded_modules(root):
        module.set_gradient_divide_factor(1.0)  # losses are divided by the counts of the global batch
        module.set_force_sum_reduction_for_comms(device.type == "cpu")  # Gloo has no premultiplied sum
    return root


def split_layers(model: PreTrainedModel, settings: FsdpConfig, meshes: Meshes) -> list[nn.Module]:
    """Applies the plans for tensor and expert parallelism. Returns the modules of experts to which tokens are sent."""
    wanted = DistributedConfig(tp_size=settings.tensor_parallel_size, ep_size=1)
    wanted.ep_size = settings.expert_parallel_size  # whose limits are those of `ParallelLayout`
    if settings.tensor_parallel_size > 1 and not model.tp_plan:
        raise ConfigError(
            f"policy.fsdp_cfg.tensor_parallel_size is {settings.tensor_parallel_size}, but {type(model).__name__} has no "
            "tensor-parallel plan in transformers; set it to 1"
        )
    if settings.expert_parallel_size > 1 and not model.ep_plan:
        raise ConfigError(
            f"policy.fsdp_cfg.expert_parallel_size is {settings.expert_parallel_size}, but {type(model).__name__} has no "
            "expert-parallel plan in transformers; set it to 1"
        )
    tensor, expert = parallel_plans(model, wanted)
    if tensor:
        for name, part in model.named_modules():  # activations with parameters (xIELU), which plans forget
            if type(part).__module__ == activations.__name__ and list(part.parameters()):
                tensor[plan_key(name)] = "replicated_with_grad_allreduce"  # they run on split hidden features
        apply_tensor_parallelism(model, meshes.dense[TENSOR], tensor)
        for name, module in model.named_modules():
            split = any(isinstance(one, DTensor) for one in module.parameters(recurse=False))
            if split and plan_key(name) not in tensor:
                _LocalParts().install_forward(module, meshes.dense[TENSOR])
    if meshes.experts is None:
        return []
    if DISPATCH in expert.values():
        apply_expert_parallelism(model, meshes.experts[EXPERT], meshes.dense[TENSOR], expert)
        names = {name for name, style in expert.items() if style == DISPATCH}
        return [part for name, part in model.named_modules() if plan_key(name) in names]
    if settings.expert_parallel_size != settings.tensor_parallel_size:
        raise ConfigError(
            f"policy.fsdp_cfg.expert_parallel_size is {settings.expert_parallel_size}, but the experts of "
            f"{type(model).__name__} are only distributed over tensor-parallel ranks; set tensor_parallel_size to the same"
        )
    apply_tensor_parallelism(model, meshes.dense[TENSOR], expert)
    return []


class _LocalParts(TensorParallelLayer):  # type: ignore[misc]
    """Runs a module with this rank's parts of its own parameters, such as attention sinks, which plans leave to it."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that are sharded on their own: entries of outermost lists, without those that share weights."""
    layers = list(_entries(model))
    owners = Counter(id(weight) for layer in layers for weight in layer.parameters())
    return [layer for layer in layers if {owners[id(weight)] for weight in layer.parameters()} == {1}]


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _entries(child)


def prepare_layer(
    layer: Any, settings: FsdpConfig, before: HostCopies | None = None, *, compiles: bool
) -> HostCopies | None:
    """Compiles a layer, and makes its backward pass recompute what `activation_checkpointing` says.

    Those of a vision tower are not compiled: torch would compile them again for each number of images, which they attend to
    one by one. Returns what keeps tensors in host memory; `before` is that of the layer before.
    """
    kind = settings.activation_checkpointing
    if compiles:
        layer.forward = torch.compile(layer.forward)
    if kind == "none":
        return None
    keeps = kind == "selective" or (kind == "offloaded" and compiles)  # else kept results would stay on the GPU
    context: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _kept)} if keeps else {}
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **context)
    if compiles:  # as one graph, if there is one: inside of it alone, single operators can be kept
        layer.forward = torch.compile(layer.forward)
    if kind != "offloaded":
        return None
    layer.forward = copies = HostCopies(layer, layer.forward, before)
    return copies


def _kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


_ATTENTION = {
    cudnn_attention.FORWARD,
    prefix_attention.FORWARD,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""Operators whose results selective checkpointing keeps: the only ones whose time grows with the square of the tokens."""


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Returns the modules that FSDP2 gathers and reduces on their own."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def reshard(root: HiddenStates) -> None:
    """Frees gathered weights. Gathered ones would keep their values when the shards change."""
    for module in sharded_modules(root):
        module.reshard()
    if root.copies is not None:
        root.copies.free()


class _Mesh:
    """What transformers asks of the mesh of a model that it loads."""

    def get_mesh(self, dims: object) -> None:
        """Returns none: parameters know their own mesh."""


def _init_missing(init_weights: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Leaves modules alone that are loaded: some cannot be initialized sharded (HYV4)."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if not own or not all(getattr(one, "_is_hf_initialized", False) for one in own):
        init_weights(module)


def sharded_class(kind: type[Any], device: torch.device, shard: Callable[[Any], None]) -> Any:
    """Returns a class of the same name that calls `shard` with a model before its files are read."""

    class Sharded(kind):  # type: ignore[misc]
        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            return distributed_config, device, _Mesh()

        @classmethod
        def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
            model._is_distributed_loading_by_transformers = True
            shard(model)
            for part in model.modules():
                if isinstance(part, PreTrainedModel):
                    part._init_weights = partial(_init_missing, part._init_weights)
            return model

    for name in ("__name__", "__qualname__", "__module__"):  # by which transformers finds a model's conversions
        setattr(Sharded, name, getattr(kind, name))
    return Sharded
