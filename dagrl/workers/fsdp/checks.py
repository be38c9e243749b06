"""What can be checked of a model and of a run's settings before workers start. Imports transformers late."""

import inspect
import logging
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from dagrl.config import Config, Json, MegatronConfig, OptimizerConfig, PolicyConfig
from dagrl.errors import ConfigError, MissingDependencyError
from dagrl.imports import load_class
from dagrl.machine import gpu_count
from dagrl.rl.routed_experts import RoutedLayers, routed_layers
from dagrl.run.cluster import gpus_per_worker
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCALAR_HEAD
from dagrl.workers.train.adapters import is_chosen_parameter

if TYPE_CHECKING:
    from dagrl.workers.fsdp.model import HiddenStates

logger = logging.getLogger(__name__)

TRANSFORMERS = "5.19"  # the first version whose parallel plans FSDP workers apply

SEPARABLE = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in which sequences of a packed row do not see each other."""


def check_settings(config: Config) -> None:
    """Raises ConfigError for settings that the FSDP worker does not have, or MissingDependencyError for an old package."""
    if Version(found := version("transformers")) < Version(TRANSFORMERS):
        raise MissingDependencyError(
            f"FSDP workers need transformers {TRANSFORMERS} or newer; found {found}; upgrade it, or set "
            "policy.backend=megatron for a model type that Megatron trains"
        )
    if config.policy.backend != "fsdp":  # which says where the layout is
        raise ConfigError(
            f"the worker's class inherits from FSDP workers, but policy.backend is {config.policy.backend}; set it to fsdp"
        )
    own, default = config.policy.megatron_cfg, MegatronConfig()
    if unread := [name for name in MegatronConfig.model_fields if getattr(own, name) != getattr(default, name)]:
        raise ConfigError(
            f"policy.megatron_cfg has {', '.join(unread)}, which policy.backend fsdp does not read; set "
            "policy.megatron_cfg={} and sizes in policy.fsdp_cfg, or policy.backend=megatron, which alone has pipelines"
        )
    fsdp = config.policy.fsdp_cfg
    if fsdp.torch_compile and fsdp.context_parallel_size > 1 and gpus_per_worker(config.cluster):
        raise ConfigError(
            f"policy.fsdp_cfg.torch_compile is true and context_parallel_size is {fsdp.context_parallel_size}, but "
            "gradients of compiled exchanges between context-parallel ranks are wrong on GPUs; set torch_compile to false"
        )


def routed_experts(config: Config, hf_config: Mapping[str, Json]) -> RoutedLayers | None:
    """Returns the sizes of the experts if the run replays or balances them. Raises ConfigError for a model without any."""
    policy = config.policy
    return routed_layers(hf_config) if policy.router_replay or policy.fsdp_cfg.moe_aux_loss_coeff else None


def layers_with_a_state(policy: PolicyConfig, hf_config: Mapping[str, Json]) -> str:
    """Names layers of a model through which tokens see each other besides attention; empty if it has none.

    Sequences of a packed row would see each other through them, and they need whole rows.
    """
    from dagrl.workers.fsdp.architecture import find_class, find_config

    scalar = bool(hf_config.get(SCALAR_HEAD))
    model = find_config(policy, hf_config, scalar=scalar)
    kinds = set(getattr(model.get_text_config(), "layer_types", None) or ()) - set(SEPARABLE)
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    return "layers with a recurrent state" if find_class(policy, model, scalar=scalar)._is_stateful else ""


def unpackable(config: Config, hf_config: Mapping[str, Json]) -> str:
    """Names that through which sequences of a packed row would see each other; empty if there is nothing."""
    policy = config.policy
    if layers := layers_with_a_state(policy, hf_config):
        return layers
    from dagrl.workers.fsdp.separation import unseparated

    return unseparated(*_attention_of(config, hf_config), images=config.data.images.enabled)


def unshared(config: Config, hf_config: Mapping[str, Json]) -> str:
    """Names that by which sequences of a packed row cannot share prefixes; empty if there is nothing."""
    from dagrl.workers.fsdp.separation import unshared as named

    return named(*_attention_of(config, hf_config), images=config.data.images.enabled)


def _attention_of(config: Config, hf_config: Mapping[str, Json]) -> tuple[type[Any], Any, str | None]:
    """Returns a model's class and configuration, and the attention that workers choose for it, None for transformers'."""
    import torch

    from dagrl.workers.fsdp.architecture import find_class, find_config
    from dagrl.workers.fsdp.attention import default_attention

    policy, scalar, cluster = config.policy, bool(hf_config.get(SCALAR_HEAD)), config.cluster
    model = find_config(policy, hf_config, scalar=scalar)
    kind, chosen = find_class(policy, model, scalar=scalar), policy.fsdp_cfg.attn_implementation
    on_gpus = bool(gpu_count() if cluster.num_gpus is None else cluster.num_gpus) and cluster.gpus_per_worker != 0
    if chosen is None and on_gpus:
        chosen = default_attention(kind, model, torch.device("cuda"), policy.precision)
    return kind, model, chosen


def _check_heads(policy: PolicyConfig, hf_config: Mapping[str, Json], ranks: int) -> None:
    """Raises ConfigError if tensor-parallel ranks cannot have as many heads each, in any layer."""
    from dagrl.workers.fsdp.architecture import find_config, layer_configs

    for layer in layer_configs(find_config(policy, hf_config, scalar=bool(hf_config.get(SCALAR_HEAD)))):
        for name in (*layer.attribute_map, *layer.to_dict()):
            heads = getattr(layer, name, None) if name.endswith(("_attention_heads", "_key_value_heads")) else None
            if isinstance(heads, int) and heads % ranks:
                raise ConfigError(
                    f"the model has {name} = {heads}, which policy.fsdp_cfg.tensor_parallel_size {ranks} does not divide; "
                    "choose a size that does"
                )


def _check_optimizer(wanted: OptimizerConfig, root: "HiddenStates") -> None:
    """Raises a UserError for an optimizer that is not installed, or that fails on a small weight of this layout.

    Steps are tried of torch's own: others may need a GPU, as steps that can be captured do.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from dagrl.workers.fsdp.trainer import is_torchs, make_optimizer

    kind: Any = load_class(wanted.name, "policy.optimizer.name")
    if not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(
            f"policy.optimizer.name is {wanted.name}, which is not an optimizer; expected: a class that inherits from "
            "torch.optim.Optimizer, such as torch.optim:AdamW"
        )
    if own := wanted.args.keys() & {"lr", "weight_decay"}:
        name = min(own)
        raise ConfigError(f"policy.optimizer.args has {name}, which policy.optimizer.{name} would overwrite; set that alone")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"policy.optimizer.name is {wanted.name}, whose steps need a closure; choose one that takes gradients, such as "
            "torch.optim:AdamW"
        )
    weight: torch.Tensor = torch.zeros(2, 2)
    if sharded := [one for one in root.parameters() if isinstance(one, DTensor) and one.ndim == 2]:
        weight = DTensor.from_local(weight, sharded[0].device_mesh, sharded[0].placements, run_check=False)
    steps = is_torchs(kind) and not wanted.args.get("capturable")
    make_optimizer(kind, [weight], wanted, wanted.args, steps=steps)


def _check_expert_adapters(policy: PolicyConfig, layout: ParallelLayout) -> None:
    """Raises ConfigError for settings next to which experts have no adapters."""
    has = "policy.peft.target_parameters is set"
    if policy.peft.refit == "adapters":
        raise ConfigError(f"{has}, but refits of adapters alone have none of experts; set policy.peft.refit=merged")
    if layout.tp > 1:
        raise ConfigError(
            f"{has}, but experts that are split over tensor-parallel ranks have no adapters; set "
            "policy.fsdp_cfg.tensor_parallel_size to 1"
        )
    multiple = 4 if policy.precision == "float32" else 8
    if policy.peft.dim % multiple:
        raise ConfigError(
            f"{has}, and policy.peft.dim is {policy.peft.dim}; grouped products in {policy.precision} take multiples of "
            f"{multiple}, such as {-(-policy.peft.dim // multiple) * multiple}"
        )


def check_model(config: Config, hf_config: Mapping[str, Json]) -> None:
    """Raises ConfigError for a model that cannot be built, or not in this layout."""
    check_settings(config)
    policy, layout = config.policy, config.policy.train_layout
    _check_heads(policy, hf_config, layout.tp)
    from dagrl.workers.fsdp.architecture import vision_tower
    from dagrl.workers.fsdp.dry import check_files, dry_model
    from dagrl.workers.fsdp.experts import expert_weights
    from dagrl.workers.fsdp.routers import find_routers

    if policy.peft.enabled and find_spec("peft") is None:
        raise MissingDependencyError("policy.peft.enabled is true, but PEFT is not installed; install dagrl[peft]")
    if policy.peft.enabled and layout.ep > 1:
        raise ConfigError(
            "policy.peft.enabled is true, but FSDP workers have no adapters next to expert parallelism; set "
            "policy.fsdp_cfg.expert_parallel_size to 1"
        )
    if policy.peft.enabled and policy.peft.target_parameters:
        _check_expert_adapters(policy, layout)
    with dry_model(policy, hf_config, layout, 0) as root:
        if root.context is not None:
            root.context.check(layout.tp)
        _check_optimizer(policy.optimizer, root)
        without = [name for name in expert_weights(root.net) if not is_chosen_parameter(name, policy.peft)]
        if policy.peft.enabled and without:
            names = sorted({".".join(name.split(".")[-2:]) for name in without})
            logger.info("%s have no adapters; policy.peft.target_parameters gives them some", ", ".join(names))
        if routed_experts(config, hf_config) is not None:
            find_routers(root.net)
        if policy.fsdp_cfg.freeze_vision_tower and vision_tower(root.net) is None:
            name = type(root.net).__name__
            raise ConfigError(
                f"policy.fsdp_cfg.freeze_vision_tower is true, but {name} has no vision tower; set it to false"
            )
    if policy.model_name is not None:
        check_files(policy, hf_config)
    what = layers_with_a_state(policy, hf_config)
    if layout.cp > 1 and what:
        raise ConfigError(
            f"policy.fsdp_cfg.context_parallel_size is {layout.cp}, but the model has {what}, which need whole rows; set it "
            "to 1"
        )
    if policy.sequence_packing.enabled and (reason := unpackable(config, hf_config)):
        raise ConfigError(
            "policy.sequence_packing.enabled is true, but sequences of one row would see each other in the model, which has "
            f"{reason}; set it to false"
        )
    if policy.sequence_packing.shared_prefix is True and (reason := unshared(config, hf_config)):
        raise ConfigError(
            f"policy.sequence_packing.shared_prefix is true, but the model has {reason}; set it to auto, or false"
        )
